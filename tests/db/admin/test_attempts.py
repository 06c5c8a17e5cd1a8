"""Attempts in the admin: the latest on the page of the task, each traceback on its own page."""

from __future__ import annotations

import re
from uuid import uuid4

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.http import Http404
from django.test.utils import CaptureQueriesContext

from django_pglock.admin import task_page
from django_pglock.admin.tasks import TaskAdmin
from django_pglock.models import Task
from tests.db.admin.visits import add_attempt, make, page_of, person, url, visit
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def content_type():
    """Load the content type before the test, because Django queries it once for each process."""
    return ContentType.objects.get_for_model(Task)


def failed(count):
    """Make a task with a number of failures, each with the longest traceback that a worker writes."""
    row = make("FAILED", attempts=count)
    execute_sql(
        """INSERT INTO django_pglock_attempt
                  (task_id, number, worker, started_at, finished_at, outcome, exception_path, traceback)
           SELECT %s, n, gen_random_uuid(), now(), now(), 'FAILED', 'builtins.ValueError',
                  'trace of ' || n || ' ' || repeat('<deep> ', 9000) FROM generate_series(1, %s) AS n""",
        [row.pk, count],
    )
    return row


def numbers_in(page):
    """Return the numbers of the attempts whose traceback a page links to."""
    return [int(number) for number in re.findall(r'/attempts/(\d+)/"', page)]


def test_the_page_of_a_task_shows_the_latest_attempts(client):
    few, many = failed(1), failed(300)
    plain, expected = visit(client, url("task", "change", few.pk))
    page, queries = visit(client, url("task", "change", many.pk))
    assert numbers_in(plain) == [1]
    assert numbers_in(page) == list(range(300, 300 - task_page.SHOWN_ATTEMPTS, -1))
    # The session, the user, permissions of the user and of groups; the task, its last failure, worker, attempts, steps.
    assert len(queries) == len(expected) == 9
    about_traces = [sql for sql in queries if '"traceback"' in sql]
    assert len(about_traces) == 1, "the end of the last one"
    assert "RIGHT(" in about_traces[0]
    assert "trace of" not in page
    assert len(page) < 100_000


def test_a_traceback_has_a_page_of_its_own(client):
    row = failed(30)
    page, queries = visit(client, url("task", "attempt", row.pk, 7))
    assert "trace of 7 &lt;deep&gt; " in page
    assert page.count("trace of") == 1
    assert "builtins.ValueError" in page
    assert len(queries) == 6
    assert len([sql for sql in queries if '"traceback"' in sql]) == 1
    assert f'href="{url("task", "change", row.pk)}"' in page


def test_an_attempt_needs_the_permission_to_see_the_task(client):
    address = url("task", "attempt", failed(2).pk, 1)
    person(client, "retry_task", "view_worker")
    with CaptureQueriesContext(connection) as queries:
        assert client.get(address).status_code == 403
    assert not [each for each in queries if '"django_pglock_' in each["sql"]]
    client.logout()
    assert "login" in client.get(address)["Location"]
    person(client, "view_task")
    assert client.get(address).status_code == 200
    assert client.post(address).status_code == 405


def test_attempts_of_a_hidden_task_are_hidden(rf):
    class Own(TaskAdmin):
        def get_queryset(self, request):
            return super().get_queryset(request).filter(queue="mine")

    request = rf.get("/")
    request.user = User.objects.create_superuser("root")
    own, row = Own(Task, admin.site), failed(1)
    with pytest.raises(Http404):
        task_page.traceback_page(own, request, row.pk, 1)
    Task.objects.filter(pk=row.pk).update(queue="mine")
    assert task_page.traceback_page(own, request, row.pk, 1).status_code == 200


@pytest.mark.parametrize("key", [2**63 - 1, 10**30])
def test_an_unknown_task_or_attempt_is_404(client, key):
    row = failed(1)
    for address in (url("task", "attempt", key, 1), url("task", "attempt", row.pk, key)):
        assert client.get(address).status_code == 404


def test_the_name_of_a_worker_is_shown_after_its_row_is_gone(client):
    row = make("FAILED", worker=uuid4(), attempts=1)
    add_attempt(row, worker=row.worker, worker_name="mail-1")
    assert "<td>mail-1</td>" in page_of(client, row)


def test_logs_are_shown_folded_where_there_are_any(client):
    quiet, row = make("FAILED", attempts=1), make("FAILED", attempts=1, log="charging <b>\nrefused")
    add_attempt(row, log="charging <i>")
    page = page_of(client, row)
    assert "<summary>2 lines</summary>" in page
    assert "charging &lt;b&gt;" in page
    assert "log of the last attempt" not in page_of(client, quiet).lower()
    assert "charging &lt;i&gt;" in client.get(url("task", "attempt", row.pk, 1)).content.decode()
