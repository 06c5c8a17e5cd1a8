"""Export of the filtered list of tasks."""

from __future__ import annotations

import csv
import json

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_pglock.admin import task_list
from tests.db.admin.visits import LIST, add_attempt, logged, make, person, url, with_csrf_checks

pytestmark = pytest.mark.django_db


def export(client, query=""):
    return client.post(url("task", "export") + query)


def csv_rows(response):
    assert response.status_code == 200
    return list(csv.DictReader(response.getvalue().decode().splitlines()))


def fail(**fields):
    task = make("FAILED", attempts=1, **fields)
    add_attempt(task, exception="a.Bad", traceback="Traceback:\na.Bad: =1+1\n")
    return task


def test_an_export_has_the_filtered_tasks_in_the_order_of_the_list(client):
    person(client, "view_task", "export_task")
    first, second, _other = fail(kwargs={"a": 1}), fail(kwargs={"a": 2}), make("READY")
    rows = csv_rows(export(client, "?status__exact=FAILED"))
    assert [int(row["id"]) for row in rows] == [second.pk, first.pk]
    assert (json.loads(rows[0]["kwargs"]), rows[0]["exception"], rows[0]["status"]) == ({"a": 2}, "a.Bad", "FAILED")
    assert logged() == ["export: ?status__exact=FAILED"]


def test_an_export_contains_no_cell_that_a_spreadsheet_runs_as_a_formula(client):
    person(client, "view_task", "export_task")
    make(lock_key="=1+1", queue="@SUM(1)", task_path="-2+3", result="\t=1", group_key="plain", priority=-5)
    fail()
    failed, row = csv_rows(export(client))
    assert failed["message"] == "'=1+1"
    assert [row[name] for name in ("lock_key", "queue", "task_path", "result")] == [
        "'=1+1",
        "'@SUM(1)",
        "'-2+3",
        "'\t=1",
    ]
    assert (row["group_key"], row["priority"]) == ("plain", "-5")


def test_an_export_hides_the_values_that_the_page_hides(client):
    person(client, "view_task", "export_task")
    make(kwargs={"card": "4111-2222", "n": 1}, meta={"redact": ["card"]}, task_path="tests.sample.tasks.echo")
    text = export(client).getvalue().decode()
    assert "4111-2222" not in text
    assert "[redacted]" in text


def test_export_needs_its_permission_and_a_form_with_a_token(client):
    make()
    assert export(client).status_code == 403
    assert "export/" not in client.get(LIST).content.decode()
    person(client, "export_task")
    assert export(client).status_code == 403, "who may not look may not export"
    user = person(client, "view_task", "export_task")
    assert "export/?queue=mail" in client.get(LIST, {"queue": "mail"}).content.decode()
    assert client.get(url("task", "export")).status_code == 405
    assert export(with_csrf_checks(user)).status_code == 403
    assert not LogEntry.objects.exists()


def test_more_than_the_limit_is_refused_in_a_sentence(client, monkeypatch):
    monkeypatch.setattr(task_list, "MOST_EXPORTED", 2)
    person(client, "view_task", "export_task")
    for _ in range(3):
        make(queue="mail")
    response = client.post(url("task", "export"), follow=True)
    assert [str(each) for each in response.context["messages"]] == [
        "More than 2 tasks match. Narrow the filters, such as by time, and export again."
    ]
    assert not LogEntry.objects.exists()
    monkeypatch.setattr(task_list, "MOST_SEARCHED", 2)
    searched = csv_rows(export(client, "?queue=mail"))
    assert len(searched) == 2, "a filter without an index looks among the newest, as the list does"


@pytest.mark.parametrize(("query", "status"), [("?kwargs__email__startswith=u", 400), ("?since=x", 302)])
def test_export_takes_the_filters_of_the_list_and_no_others(client, query, status):
    person(client, "view_task", "export_task")
    assert export(client, query).status_code == status
    assert not LogEntry.objects.exists()


def test_rows_are_fetched_some_at_a_time_by_a_cursor_of_the_server(client, monkeypatch):
    """A file of 100,000 tasks with their arguments does not fit into the memory of every web process."""
    monkeypatch.setattr(task_list, "CHUNK", 2)
    person(client, "view_task", "export_task")
    tasks = [fail() for _ in range(5)]
    response = export(client)
    with CaptureQueriesContext(connection) as queries:
        lines = response.getvalue().decode().splitlines()
    assert len(lines) == 1 + len(tasks)
    attempts = [each for each in queries if 'FROM "django_pglock_attempt"' in each["sql"]]
    assert len(attempts) == 3, "the failures of two tasks at a time"
    assert any("DECLARE" in each["sql"] for each in queries), [each["sql"][:60] for each in queries]
