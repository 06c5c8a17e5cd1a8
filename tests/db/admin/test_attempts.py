"""Attempts in the admin: the latest on the task's page, all in a list, each traceback on its own page."""

from __future__ import annotations

import re
from types import SimpleNamespace
from uuid import uuid4

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.contrib.contenttypes.models import ContentType
from django.db import connection
from django.db.models.functions import Now
from django.http import Http404
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_pglock.admin import task_page
from django_pglock.admin.tasks import TaskAdmin
from django_pglock.models import Attempt, Task
from tests.db.admin.visits import make, person

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def content_type():
    """Load the content type before the test, because Django queries it once for each process."""
    return ContentType.objects.get_for_model(Task)


def failed(count, *, status="FAILED"):
    """Make a task with a number of failures, each with the longest traceback that a worker writes."""
    row = make(status, attempts=count)
    with connection.cursor() as cursor:
        cursor.execute(
            """INSERT INTO django_pglock_attempt
                      (task_id, number, worker, started_at, finished_at, outcome, exception_path, traceback)
               SELECT %s, n, gen_random_uuid(), now(), now(), 'FAILED', 'builtins.ValueError',
                      'trace of ' || n || ' ' || repeat('<deep> ', 9000) FROM generate_series(1, %s) AS n""",
            [row.pk, count],
        )
    return row


def address(page, *args):
    return reverse(f"admin:django_pglock_task_{page}", args=args)


def visit(client, url):
    """Return the text of a page, and the statements that it sent."""
    with CaptureQueriesContext(connection) as queries:
        response = client.get(url)
    assert response.status_code == 200
    return response.content.decode(), [each["sql"] for each in queries]


def numbers_in(page):
    """Return the numbers of the attempts whose traceback a page links to."""
    return [int(number) for number in re.findall(r'/attempts/(\d+)/"', page)]


def test_the_page_of_a_task_shows_the_last_twenty_attempts(client):
    person(client, "view_task")
    few, many = failed(1), failed(300)
    plain, expected = visit(client, address("change", few.pk))
    page, queries = visit(client, address("change", many.pk))
    assert numbers_in(plain) == [1]
    assert numbers_in(page) == list(range(300, 280, -1))
    assert f'href="{address("attempts", many.pk)}"' in page
    assert len(queries) == len(expected)
    assert sum(sql.startswith('SELECT "django_pglock_attempt"') for sql in queries) == 2
    about_traces = [sql for sql in queries if '"traceback"' in sql]
    assert len(about_traces) == 1, "the end of the last one"
    assert "RIGHT(" in about_traces[0]
    assert "trace of" not in page
    assert len(page) < 100_000


def test_the_statements_of_a_task_page_are_counted(client):
    person(client, "view_task")
    _page, queries = visit(client, address("change", failed(30).pk))
    # The session, the user, permissions of the user and of groups; the task, its last failure, worker and attempts.
    assert len(queries) == 8, queries


def test_all_attempts_are_listed_by_pages(client):
    person(client, "view_task")
    row = failed(250)
    failed(3)
    found, url, pages = [], address("attempts", row.pk), 0
    while url:
        page, queries = visit(client, url)
        assert len(queries) == 6, "as many on each page"
        assert not [sql for sql in queries if '"traceback"' in sql or '"kwargs"' in sql]
        assert "builtins.ValueError" in page
        found += numbers_in(page)
        older = re.search(r'href="(\?before=\d+)"', page)
        url = older and address("attempts", row.pk) + older[1]
        pages += 1
    assert found == list(range(250, 0, -1))
    assert pages == 3


@pytest.mark.parametrize("count", [task_page.PER_PAGE, task_page.PER_PAGE + 1])
def test_older_attempts_are_offered_only_where_there_are_any(client, count):
    person(client, "view_task")
    page, _queries = visit(client, address("attempts", failed(count).pk))
    assert ("?before=" in page) is (count > task_page.PER_PAGE)


def test_a_task_without_failures_has_an_empty_list(client):
    person(client, "view_task")
    page, _queries = visit(client, address("attempts", make().pk))
    assert "No attempt of this task has failed or been lost." in page
    assert numbers_in(page) == []


def test_a_traceback_has_a_page_of_its_own(client):
    person(client, "view_task")
    row = failed(30)
    page, queries = visit(client, address("attempt", row.pk, 7))
    assert "trace of 7 &lt;deep&gt; " in page
    assert page.count("trace of") == 1
    assert "builtins.ValueError" in page
    assert len(queries) == 6
    assert len([sql for sql in queries if '"traceback"' in sql]) == 1
    assert f'href="{address("attempts", row.pk)}"' in page
    assert f'href="{address("change", row.pk)}"' in page


@pytest.mark.parametrize("page", ["attempts", "attempt"])
def test_attempts_need_the_permission_to_see_the_task(client, page):
    row = failed(2)
    url = address(page, row.pk, *[1][: page == "attempt"])
    person(client, "retry_task", "view_worker")
    with CaptureQueriesContext(connection) as queries:
        assert client.get(url).status_code == 403
    assert not [each for each in queries if '"django_pglock_' in each["sql"]]
    client.logout()
    assert "login" in client.get(url)["Location"]
    person(client, "view_task")
    assert client.get(url).status_code == 200
    assert client.post(url).status_code == 405


def test_attempts_of_a_hidden_task_are_hidden(rf):
    class Own(TaskAdmin):
        def get_queryset(self, request):
            return super().get_queryset(request).filter(queue="mine")

    request = rf.get("/")
    request.user = User.objects.create_superuser("root")
    own, row = Own(Task, admin.site), failed(1)
    for view, args in ((task_page.list_page, ()), (task_page.traceback_page, (1,))):
        with pytest.raises(Http404):
            view(own, request, row.pk, *args)
        Task.objects.filter(pk=row.pk).update(queue="mine")
        assert view(own, request, row.pk, *args).status_code == 200
        Task.objects.filter(pk=row.pk).update(queue="other")


@pytest.mark.parametrize("key", [2**63 - 1, 10**30])
def test_an_unknown_task_or_attempt_is_404(client, key):
    person(client, "view_task")
    row = failed(1)
    for url in (address("attempts", key), address("attempt", key, 1), address("attempt", row.pk, key)):
        assert client.get(url).status_code == 404


@pytest.mark.parametrize("before", ["x", "", "-1", "1e3", "\x00", "٣", str(10**30), "1; --"])
def test_a_page_that_is_no_number_is_refused_without_a_query(client, before):
    person(client, "view_task")
    row = failed(1)
    with CaptureQueriesContext(connection) as queries:
        assert client.get(address("attempts", row.pk), {"before": before}).status_code == 400
    assert not [each for each in queries if '"django_pglock_' in each["sql"]]


def test_the_confirmation_page_of_a_deletion_loads_no_traceback(client):
    person(client, "view_task", "delete_task")
    few, many = failed(1), failed(300)
    plain, expected = visit(client, address("delete", few.pk))
    page, queries = visit(client, address("delete", many.pk))
    assert "Attempts: 1" in plain
    assert "Attempts: 300" in page
    assert len(page) < len(plain) + 100
    assert len(queries) == len(expected)
    assert not [sql for sql in queries if '"traceback"' in sql]
    assert client.post(address("delete", many.pk), {"post": "yes"}).status_code == 302
    assert list(Task.objects.values_list("pk", flat=True)) == [few.pk]
    assert Attempt.objects.count() == 1


def test_django_asks_before_a_deletion_where_a_project_refers_to_tasks(rf, monkeypatch):
    """A model of the project may protect a task from deletion, or its rows may need a permission."""
    request = rf.get("/")
    request.user = User.objects.create_superuser("root")
    row = failed(3)
    own = TaskAdmin(Task, admin.site)
    assert own.get_deleted_objects([row], request) == ([str(row)], {"tasks": 1, "attempts": 3}, set(), [])
    other = SimpleNamespace(auto_created=True, related_model=User, concrete=False, one_to_one=False, one_to_many=False)
    fields = [*Task._meta.get_fields(include_hidden=True), other]
    monkeypatch.setattr(Task._meta, "get_fields", lambda **options: fields)
    [_task, listed], counts, refused, protected = own.get_deleted_objects([row], request)
    assert (len(listed), counts, refused, protected) == (3, {"tasks": 1, "attempts": 3}, set(), [])


def test_the_name_of_a_worker_is_shown_after_its_row_is_gone(client):
    person(client, "view_task")
    worker = uuid4()
    row = make("FAILED", worker=worker, attempts=1)
    about = {"started_at": Now(), "finished_at": Now(), "outcome": "FAILED", "exception_path": "a.B", "traceback": "x"}
    Attempt.objects.create(task=row, number=1, worker=worker, worker_name="mail-1", **about)
    for page in ("change", "attempts"):
        text = client.get(reverse(f"admin:django_pglock_task_{page}", args=[row.pk])).content.decode()
        assert "mail-1" in text
        assert str(worker) not in text


def test_logs_are_shown_folded_where_there_are_any(client):
    person(client, "view_task")
    quiet, row = make("FAILED", attempts=1), make("FAILED", attempts=1, log="charging <b>\nrefused")
    Attempt.objects.create(
        task=row, number=1, started_at=Now(), finished_at=Now(), outcome="FAILED",
        exception_path="builtins.ValueError", traceback="Traceback", log="charging <i>",
    )  # fmt: skip
    page = client.get(reverse("admin:django_pglock_task_change", args=[row.pk])).content.decode()
    assert "<summary>2 lines</summary>" in page
    assert "charging &lt;b&gt;" in page
    assert (
        "log of the last attempt"
        not in client.get(reverse("admin:django_pglock_task_change", args=[quiet.pk])).content.decode().lower()
    )
    attempt = client.get(reverse("admin:django_pglock_task_attempt", args=[row.pk, 1])).content.decode()
    assert "charging &lt;i&gt;" in attempt
