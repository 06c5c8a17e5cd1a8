"""The plans of the lists of tasks, where the tasks that they show lie in the middle of a long history."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from django.core.management import call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_pglock.admin import task_list
from django_pglock.models import Task
from tests.plans.admin.explained import most_read, plans
from tests.plans.reading import analyze, executed, insert, reads, rows_read

pytestmark = pytest.mark.django_db

LIST = reverse("admin:django_pglock_task_changelist")


@pytest.fixture(scope="module")
def twenty_six_thousand(fill):
    fill(write_old_ones)


@pytest.fixture
def old_ones(twenty_six_thousand, db):
    """Tasks of two statuses in the middle of a long history, with current statistics."""


def write_old_ones():
    for status, count in (("SUCCESSFUL", 10_000), ("FAILED", 3000), ("BLOCKED", 3000), ("SUCCESSFUL", 10_000)):
        insert(status, count, lock="key")
    analyze()


def test_a_list_of_one_status_reads_no_other(admin_client, old_ones):
    for query in ("BLOCKED", "BLOCKED&o=-1", "FAILED&p=2"):
        with CaptureQueriesContext(connection) as queries:
            page = admin_client.get(f"{LIST}?status__exact={query}")
        ids = [row.pk for row in page.context["cl"].result_list]
        assert (len(ids), page.context["cl"].result_count) == (30, 3000), query
        assert ids == sorted(ids, reverse="o=-1" not in query)
        assert most_read(queries) <= 3000, query


def test_a_filter_without_an_index_searches_a_limited_number_of_tasks(admin_client, old_ones, monkeypatch):
    """The matching task is an old one, so the first pages search and find nothing."""
    rare = Task.objects.filter(status="BLOCKED").earliest("pk")
    Task.objects.filter(pk=rare.pk).update(queue="rare", task_path="rare")
    for query, most, counts in (
        ("queue=rare", 10_000, [0, 1, 0]),
        ("q=rare", 10_000, [0, 1, 0]),
        ("task_path=rare&o=-1", 10_000, [0, 1, 0]),
        ("queue=rare&status__exact=BLOCKED", 2000, [0, 1]),
        ("queue=rare&status__exact=BLOCKED", 3000, [1]),
    ):
        monkeypatch.setattr(task_list, "MOST_SEARCHED", most)
        found = []
        address = f"?{query}"
        while address:
            with CaptureQueriesContext(connection) as queries:
                page = admin_client.get(LIST + address)
            assert most_read(queries) <= 12_000, query
            found.append(len(page.context["cl"].result_list))
            address = page.context["cl"].older_query
            assert ("tasks were searched" in page.content.decode()) is bool(address), query
        assert found == counts, f"{query}: on the pages to which the links lead, one after the other"


@pytest.mark.parametrize(
    ("name", "status", "field", "value", "index"),
    [
        ("fingerprint__exact", "FAILED", "fingerprint", 7, "pglock_task_fingerprint"),
        ("key", "BLOCKED", "lock_key", "rare", "pglock_task_lock"),
    ],
)
def test_a_filter_is_read_along_the_index_that_it_names(admin_client, old_ones, name, status, field, value, index):
    few = Task.objects.filter(pk__in=list(Task.objects.filter(status=status).values_list("pk", flat=True)[:5]))
    count = few.update(**{field: value})
    analyze()
    with CaptureQueriesContext(connection) as queries:
        page = admin_client.get(LIST, {"status__exact": status, name: value})
    assert page.context["cl"].result_count == count
    assert page.context["cl"].searched == 0, "so it has counted"
    assert most_read(queries) <= 5
    assert index in {each for _sql, plan in plans(queries) for _kind, each in reads(plan)}


def test_autocomplete_finds_tasks_only_by_id(admin_client, old_ones):
    """A form with ``autocomplete_fields`` sends a query for each letter that a user types."""
    query = {"app_label": "django_pglock", "model_name": "attempt", "field_name": "task", "term": "tests"}
    with CaptureQueriesContext(connection) as queries:
        assert admin_client.get(reverse("admin:autocomplete"), query).json()["results"] == []
    assert not [each for each in queries if '"django_pglock_task"' in each["sql"]]


def test_tasks_of_some_statuses_are_listed_without_the_others(old_ones):
    out = StringIO()
    with CaptureQueriesContext(connection) as queries:
        call_command("locktasks", "list", "--status", "BLOCKED", "--status", "FAILED", "--limit", "3001", stdout=out)
    statuses = re.findall("BLOCKED|FAILED", out.getvalue())
    assert statuses == ["BLOCKED"] * 3000 + ["FAILED"], "the newest first"
    assert most_read(queries) <= 3001


SHOWN = (
    *("", "status__exact=FAILED", "status__exact=SUCCESSFUL", "status__exact=FAILED&queue=default", "queue=default"),
    *("task_path=rare", "since=2020-01-01", "before=2020-01-01", "before=2100-01-01", "exception=a.B", "key=key"),
    *("since=2020-01-01&before=2100-01-01", "status__exact=FAILED&since=2020-01-01&before=2100-01-01&task_path=rare"),
    *(
        "status__exact=SUCCESSFUL&since=2020-01-01&before=2100-01-01",
        "exception=a.B&since=2020-01-01&before=2100-01-01",
    ),
    *(
        "argument=a=1",
        "metadata=a=1",
        "status__exact=RUNNING&worker=nobody",
        "since=2020-01-01&worker=nobody",
        "attention=stuck",
        "key=rare",
    ),
)


def test_a_page_of_the_list_sends_at_most_six_statements_with_those_of_the_login(admin_client, old_ones, monkeypatch):
    monkeypatch.setattr(task_list, "MOST_SEARCHED", 10_000)
    for query in SHOWN:
        with CaptureQueriesContext(connection) as queries:
            admin_client.get(f"{LIST}?{query}")
        assert len(queries) <= 6, (query, [each["sql"] for each in queries])
        read = [rows_read(executed(sql)) for sql, _plan in plans(queries)]
        assert max(read, default=0) <= 10_100, query
