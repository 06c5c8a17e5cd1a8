"""The list of tasks: its columns, searches, and links to older tasks."""

from __future__ import annotations

import contextlib
from uuid import uuid4

import pytest
from django.db import IntegrityError, connection, transaction
from django.db.models.functions import Now
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_pglock.admin import pages
from django_pglock.models import Attempt
from django_pglock.store.liveness import beat
from tests.db.admin.visits import LIST, ids, make, person

pytestmark = pytest.mark.django_db


QUERIES = (
    "?status__exact=READY", "?queue=mail", "?task_path=x", "?attention=stuck", "?q=nothing", "?q=1",
    "?q=%00", "?queue=%00", "?task_path=%00", "?status__exact=%00", "?status__exact=NO", "?attention=x",
    "?p=abc", "?p=-1", "?id__lt=abc", "?id__lt=" + "9" * 30, "?_facets=True", "?all=",
    "?since=%00", "?since=x", "?since=2026-13-01", "?worker=%00", "?key=%00", "?argument=x", "?argument==1",
    "?argument=a=%00", "?argument=a=NaN", "?argument=a=%5Cu0000", "?metadata=a=%22%5Cu0000%22", "?exception=%00",
    "?argument=a=1e999", "?metadata=a=1e999", "?argument=a=%22%5Cud800%22",
    "?q=" + "9" * 5000, "?id__lt=" + "9" * 5000, "?q=x&id__lt=" + "9" * 5000, "?argument=a=" + "9" * 5000,
    "?metadata=a=" + "9" * 5000, "?p=" + "9" * 5000, "?o=" + "9" * 5000,
    "?since=2026-01-01T00:00-23:59", "?before=0001-01-01T00:00%2B23:59",
    "?o=99", "?q=" + "9" * 30, "?q=%27%3B--", "?o=1", "?p=999", "?id__lt=5",
)  # fmt: skip


def test_filters_and_the_search_of_the_task_list_answer_any_text(client):
    person(client, "view_task")
    make()
    for query in QUERIES:
        assert client.get(LIST + query, follow=True).status_code == 200, query


@pytest.mark.parametrize("zone", ["Etc/GMT+12", "Pacific/Kiritimati"])
def test_no_date_that_another_program_can_write_breaks_the_pages(client, zone):
    person(client, "view_task")
    tasks = {}
    for date in ("infinity", "-infinity", "10000-01-01", "9999-12-30 00:00Z", "0001-01-02 00:00Z"):
        tasks[date] = make("SCHEDULED")
        with connection.cursor() as cursor, contextlib.suppress(IntegrityError), transaction.atomic():
            cursor.execute("UPDATE django_pglock_task SET run_after = %s WHERE id = %s", [date, tasks[date].pk])
    with override_settings(TIME_ZONE=zone):
        assert len(ids(client)) == len(tasks)
        for date, task in tasks.items():
            assert client.get(f"{LIST}{task.pk}/change/").status_code == 200, date


def test_search_finds_by_id_and_by_function(client):
    person(client, "view_task")
    mine, other = make(), make(task_path="tests.sample.tasks.echo")
    for term in (str(mine.pk), "tests.sample.tasks.nothing", "nothing"):
        found = client.get(LIST, {"q": term}).content.decode()
        assert f"#{mine.pk}<" in found
        assert f"#{other.pk}<" not in found


def test_the_list_is_counted_up_to_a_limit_and_links_to_older_tasks(client, monkeypatch):
    monkeypatch.setattr(pages, "MOST_COUNTED", 7)
    monkeypatch.setattr("django_pglock.admin.tasks.TaskAdmin.list_per_page", 5)
    person(client, "view_task")
    rows = [make() for _ in range(12)]
    page = client.get(LIST)
    assert page.context["cl"].result_count == 7
    assert f"id__lt={rows[7].pk}" in page.content.decode()
    older = client.get(LIST + f"?id__lt={rows[7].pk}").content.decode()
    assert f"#{rows[6].pk}<" in older
    assert f"#{rows[7].pk}<" not in older


def test_the_list_links_to_older_tasks_only_if_there_are_any(client, monkeypatch):
    monkeypatch.setattr("django_pglock.admin.tasks.TaskAdmin.list_per_page", 3)
    person(client, "view_task")
    rows = [make() for _ in range(5)]

    def older(**query):
        return client.get(LIST, query).context["cl"].older_query

    assert f"id__lt={rows[2].pk}" in older()
    assert older(p=2) == ""
    assert older(o="-0") == "", "the oldest come first here"


def test_the_task_list_warns_if_no_worker_can_run_the_ready_tasks(client):
    person(client, "view_task")
    warning = "no worker is alive that could run them. Start one: manage.py runlockworker"
    assert warning not in client.get(LIST).content.decode(), "there is no task"
    make("SCHEDULED")
    assert warning not in client.get(LIST).content.decode(), "no task is ready"
    make("READY")
    assert warning in client.get(LIST).content.decode()
    beat("default", uuid4(), name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)
    assert warning not in client.get(LIST).content.decode()


def fail(task, exception="builtins.ValueError", message="bad", number=1):
    trace = f"Traceback (most recent call last):\n  File 'a.py', line 1\n{exception.rpartition('.')[2]}: {message}\n"
    dates = {"started_at": Now(), "finished_at": Now()}
    Attempt.objects.create(
        task=task, number=number, outcome="FAILED", exception_path=exception, traceback=trace, **dates
    )


def test_failed_tasks_are_listed_with_exception_and_message(client):
    person(client, "view_task")
    failed, retried, fine = make("FAILED", attempts=3, uncounted=1), make("SCHEDULED", attempts=1), make("SUCCESSFUL")
    for number in (1, 2):
        fail(failed, message=f"<message {number}>", number=number)
    fail(retried, "shop.errors.Declined", "later")
    fail(fine)
    with CaptureQueriesContext(connection) as queries:
        page = client.get(LIST).content.decode()
    assert "ValueError</a>: &lt;message 2&gt;" in page
    assert "message 1" not in page, "the last attempt, not the first"
    assert "Declined</a>: later" in page
    assert page.count('"pglock-failure"') == 2, "none of a task that has succeeded"
    assert len([each for each in queries if "django_pglock_attempt" in each["sql"]]) == 1
    assert ids(client, exception="builtins.ValueError") == [failed.pk]
    assert ids(client, exception="shop.errors.Declined") == [], "it has not failed for good"
