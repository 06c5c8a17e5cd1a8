"""The index on arguments, which a project may create: the filters of the admin then find tasks of any age."""

from __future__ import annotations

from io import StringIO

import pytest
from django.contrib.admin import site
from django.core.management import call_command
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_pglock.admin import task_filters, task_list
from django_pglock.models import Task
from django_pglock.store import argument_index
from tests.plans.admin.test_pages import LIST
from tests.plans.reading import analyze, executed, rows_read

pytestmark = pytest.mark.django_db(transaction=True)

ROWS = """
INSERT INTO django_pglock_task (queue, task_path, backend, args, kwargs, meta)
SELECT 'default', 'tests.sample.tasks.record', 'default', jsonb_build_array(n, 0),
       jsonb_build_object('order', n, 'kind', 'x'), jsonb_build_object('tenant', n % 2000)
FROM generate_series(1, 20000) AS n
"""


@pytest.fixture(autouse=True)
def many(monkeypatch):
    for module in (task_list, task_filters):
        monkeypatch.setattr(module, "MOST_SEARCHED", 2000)
    monkeypatch.setattr(task_filters, "FIRST_SEARCHED", 1000)
    with connection.cursor() as cursor:
        cursor.execute(ROWS)
    analyze()
    yield
    argument_index.drop_argument_index("default")


def change(*options):
    out = StringIO()
    call_command("locktasks", "index", "--arguments", *options, stdout=out)
    return out.getvalue().strip()


def listed(client, query):
    """Return the orders on a page, whether it says that only the newest were searched, and the search by the index."""
    with CaptureQueriesContext(connection) as queries:
        page = client.get(f"{LIST}?{query}")
    ids = [task.pk for task in page.context["cl"].result_list]
    orders = [task.kwargs["order"] for task in Task.objects.filter(pk__in=ids).order_by("-pk")]
    by_index = [each["sql"] for each in queries if "enable_seqscan" in each["sql"]]
    return orders, "tasks were searched" in page.content.decode(), by_index


ORDERS = {
    "argument=order=7": [7],
    "metadata=tenant=7": [18007, 16007, 14007, 12007, 10007, 8007, 6007, 4007, 2007, 7],
    "argument=order=7&status__exact=READY": [7],
    "argument=name=7&task_path=tests.sample.tasks.record": [7],
    "argument=order=20001": [],
}


def test_with_the_index_tasks_of_any_age_are_found(admin_client):
    for query, orders in ORDERS.items():
        assert listed(admin_client, query)[:2] == ([order for order in orders if order > 18_000], True), query
    change()
    for query, orders in ORDERS.items():
        found, is_limited, [message] = listed(admin_client, query)
        assert (found, is_limited) == (orders, False), query
        settings, sql = message.rstrip(";").rsplit(";", 2)[-2:]
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(settings)
            plan = executed(sql)
        assert "pglock_task_arguments" in str(plan), query
        assert rows_read(plan) <= 2 * len(orders), query


def test_a_value_of_very_many_tasks_is_searched_for_among_the_newest(admin_client, monkeypatch):
    change()
    orders, _, by_index = listed(admin_client, "argument=kind=x")
    assert (orders[0], by_index) == (20_000, []), "they filled the page"
    monkeypatch.setattr(site.get_model_admin(Task), "list_per_page", 3)
    assert listed(admin_client, "metadata=tenant=7")[0] == [18_007, 16_007, 14_007], "the newest fill the page"
    monkeypatch.setattr(argument_index, "MOST_FOUND", 5)
    assert listed(admin_client, "metadata=tenant=7")[:2] == ([18_007], True)


def test_the_command_creates_the_index_and_drops_it():
    assert "was created" in change()
    assert "there already" in change()
    assert "was dropped" in change("--drop")
    assert "no index" in change("--drop")
