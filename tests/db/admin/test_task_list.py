"""The list of tasks: its indexes, filters, columns, searches, and links to older tasks."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from inspect import signature

import pytest
from django.contrib import admin
from django.db import IntegrityError, connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_pglock.admin import pages, task_list
from django_pglock.admin.task_list import Reading
from django_pglock.admin.tasks import TaskAdmin
from django_pglock.models import Task
from tests.db.admin.visits import LIST, add_attempt, ids, make, start_worker
from tests.sample.tasks import echo

pytestmark = pytest.mark.django_db


QUERIES = (
    "?status__exact=READY", "?queue=mail", "?task_path=x", "?attention=stuck", "?q=nothing", "?q=1",
    "?q=%00", "?status__exact=NO", "?attention=x",
    "?p=abc", "?p=-1", "?id__lt=abc", "?id__lt=" + "9" * 30, "?_facets=True", "?all=",
    "?since=x", "?since=2026-13-01", "?since=0001-01-01T00:00%2B14:00", "?before=9999-12-31T23:59",
    "?worker=x", "?argument=x", "?argument==1", "?argument=a=NaN",
    "?q=" + "9" * 5000, "?id__lt=" + "9" * 5000, "?q=x&id__lt=" + "9" * 5000, "?argument=a=" + "9" * 5000,
    "?p=" + "9" * 5000, "?o=" + "9" * 5000,
    "?since=2026-01-01&status__exact=FAILED&fingerprint__exact=x", "?key=a&q=x", "?worker=a&q=x&status__exact=RUNNING",
    "?key=a&queue=b&since=2026-01-01",
    "?o=99", "?q=" + "9" * 30, "?q=%27%3B--", "?o=1", "?p=999", "?id__lt=5",
)  # fmt: skip


def test_filters_and_the_search_of_the_task_list_answer_any_text(client):
    make()
    for query in QUERIES:
        assert client.get(LIST + query, follow=True).status_code == 200, query


def test_columns_that_are_equal_in_all_rows_are_left_out(client):
    make(), make()
    assert {"queue", "priority"}.isdisjoint(client.get(LIST).context["cl"].list_display)
    make(priority=10, queue="mail")
    assert {"queue", "priority"} <= set(client.get(LIST).context["cl"].list_display)


def test_the_duration_of_a_finished_task_is_that_of_its_last_attempt(client):
    now = timezone.now()
    first, last = now - timedelta(hours=2), now - timedelta(seconds=2)
    make(status="SUCCESSFUL", started_at=first, last_attempted_at=last, finished_at=now, attempts=2)
    page = client.get(LIST).content.decode()
    assert "2.000 s" in page
    assert "&times;2" in page


def test_a_status_in_an_address_that_was_written_by_hand_is_the_filter(client):
    failed, _ = make(status="FAILED"), make()
    response = client.get(f"{LIST}?status=failed&queue=default", follow=True)
    assert response.redirect_chain == [(f"{LIST}?queue=default&status__exact=FAILED", 302)]
    assert [row.pk for row in response.context["cl"].result_list] == [failed.pk]


@pytest.mark.parametrize("zone", ["Etc/GMT+12", "Pacific/Kiritimati"])
def test_no_date_that_another_program_can_write_breaks_the_pages(client, zone):
    tasks = {}
    for date in ("infinity", "-infinity", "10000-01-01", "9999-12-30 00:00Z", "0001-01-02 00:00Z"):
        tasks[date] = make("SCHEDULED")
        with connection.cursor() as cursor, contextlib.suppress(IntegrityError), transaction.atomic():
            cursor.execute("UPDATE django_pglock_task SET run_after = %s WHERE id = %s", [date, tasks[date].pk])
    with override_settings(TIME_ZONE=zone):
        assert len(ids(client)) == len(tasks)
        for date, task in tasks.items():
            assert client.get(f"{LIST}{task.pk}/change/").status_code == 200, date


@pytest.mark.parametrize(
    ("query", "index", "is_search"),
    [
        ("", "django_pglock_task_pkey", False),
        ("p=2&o=-1&q=17&id__lt=9", "django_pglock_task_pkey", False),
        ("q=mail", "django_pglock_task_pkey", True),
        ("queue=mail", "django_pglock_task_pkey", True),
        ("since=2026-01-01", "django_pglock_task_pkey", True),
        ("status__exact=SUCCESSFUL", "django_pglock_task_pkey", True),
        ("status__exact=READY", "pglock_task_attention", False),
        ("status__exact=READY&queue=mail", "pglock_task_attention", True),
        ("attention=stuck", "pglock_task_attention", True),
        ("exception=a.B", "pglock_task_attention", True),
        ("status__exact=FAILED", "pglock_task_attention", False),
        ("status__exact=FAILED&queue=mail", "pglock_task_attention", True),
        ("status__exact=FAILED&task_path=a.b", "pglock_task_attention", True),
        ("status__exact=FAILED&fingerprint__exact=7&id__lt=9", "pglock_task_fingerprint", False),
        ("status__exact=FAILED&fingerprint__exact=7&of_a_project=1", "pglock_task_attention", True),
        ("status__exact=NO", "django_pglock_task_pkey", True),
        ("key=a", "pglock_task_lock", False),
        ("key=a&status__exact=BLOCKED", "pglock_task_lock", False),
        ("key=a&queue=mail", "django_pglock_task_pkey", True),
        ("key=a&status__exact=SUCCESSFUL", "django_pglock_task_pkey", True),
        ("key=a&status__exact=FAILED", "pglock_task_attention", True),
        ("worker=w", "django_pglock_task_pkey", True),
        ("worker=w&status__exact=RUNNING", "pglock_task_attention", True),
    ],
)
def test_the_filters_choose_the_index_and_whether_it_serves_all_of_them(rf, query, index, is_search):
    reading = Reading(rf.get(f"/?{query}"))
    assert (reading.index.name, reading.is_search) == (index, is_search)


def test_a_filter_of_a_project_is_searched_for_among_the_newest_tasks(rf, admin_user, monkeypatch):
    class Own(TaskAdmin):
        list_filter = (*TaskAdmin.list_filter, "priority")

    monkeypatch.setattr(task_list, "MOST_SEARCHED", 4)
    rows = [make(priority=5 - number) for number in range(6)]
    request = rf.get("/", {"priority": "3"})
    request.user = admin_user
    found = Own(Task, admin.site).get_changelist_instance(request)
    assert ([row.pk for row in found.result_list], found.searched) == ([rows[2].pk], 4)
    request = rf.get("/", {"priority": "5"})
    request.user = admin_user
    found = Own(Task, admin.site).get_changelist_instance(request)
    assert (found.result_list, found.search_end) == ([], rows[1].pk)


def test_search_finds_by_id_and_by_function(client):
    mine, other = make(), make(task_path="tests.sample.tasks.echo")
    for term in (str(mine.pk), "tests.sample.tasks.nothing", "nothing"):
        found = client.get(LIST, {"q": term}).content.decode()
        assert f"#{mine.pk}<" in found
        assert f"#{other.pk}<" not in found


def test_the_list_is_counted_up_to_a_limit_and_links_to_older_tasks(client, monkeypatch):
    monkeypatch.setattr(pages, "MOST_COUNTED", 7)
    monkeypatch.setattr("django_pglock.admin.tasks.TaskAdmin.list_per_page", 5)
    rows = [make() for _ in range(12)]
    page = client.get(LIST)
    assert page.context["cl"].result_count == 7
    assert f"id__lt={rows[7].pk}" in page.content.decode()
    older = client.get(LIST + f"?id__lt={rows[7].pk}").content.decode()
    assert f"#{rows[6].pk}<" in older
    assert f"#{rows[7].pk}<" not in older


def test_the_list_links_to_older_tasks_only_if_there_are_any(client, monkeypatch):
    monkeypatch.setattr("django_pglock.admin.tasks.TaskAdmin.list_per_page", 3)
    rows = [make() for _ in range(5)]

    def older(**query):
        return client.get(LIST, query).context["cl"].older_query

    assert f"id__lt={rows[2].pk}" in older()
    assert older(p=2) == ""
    assert older(o="-0") == "", "the oldest come first here"


def fail(task, exception="builtins.ValueError", message="bad", number=1):
    trace = f"Traceback (most recent call last):\n  File 'a.py', line 1\n{exception.rpartition('.')[2]}: {message}\n"
    add_attempt(task, number, exception, traceback=trace)


def test_failed_tasks_are_listed_with_exception_and_message(client):
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


# Filters: what they find, what they refuse, and what they never find


def test_the_time_of_enqueueing_limits_the_list(client):
    early, late = make(enqueued_at="2026-01-01T10:00Z"), make(enqueued_at="2026-01-02T10:00Z")
    assert ids(client, since="2026-01-01T10:00:01") == [late.pk]
    assert ids(client, since="2026-01-01T10:00") == [late.pk, early.pk]
    assert ids(client, before="2026-01-02T10:00") == [early.pk]
    assert ids(client, since="2026-01-01T11:00", before="2026-01-02T09:00") == []
    assert ids(client, since="2026-01-01", queue="default", status__exact="READY") == [late.pk, early.pk]


def test_the_task_list_shows_a_message_if_a_filter_value_is_invalid(client):
    """Otherwise an action on the whole list would change tasks that the filter should exclude."""
    page = client.get(LIST, {"argument": "order_id 7"}, follow=True).content.decode()
    assert "A filter could not be read, so the list is not filtered." in page
    assert "could not be read" not in client.get(LIST).content.decode()


def test_tasks_whose_ids_are_not_in_order_of_time_are_found_by_time(client):
    """A transaction may get its ids first and commit last."""
    late, early = make(enqueued_at="2026-01-01T10:00:30Z"), make(enqueued_at="2026-01-01T10:00:00Z")
    assert ids(client, since="2026-01-01T10:00:10") == [late.pk]
    assert ids(client, before="2026-01-01T10:00:10") == [early.pk]


def test_the_tasks_of_a_worker_are_found_by_its_name_and_by_its_id(client):
    worker = start_worker("mail-1")
    mine, done, _other = make("RUNNING", worker=worker), make("SUCCESSFUL", worker=worker), make("RUNNING")
    assert ids(client, worker="mail-1") == ids(client, worker=str(worker)) == [done.pk, mine.pk]
    assert ids(client, worker="mail-1", status__exact="RUNNING") == [mine.pk]
    assert ids(client, worker="nobody") == []


def test_keys_arguments_and_metadata_are_found_by_equality(client):
    row = make(lock_key="order:7", kwargs={"order": 7, "name": "x"}, meta={"tenant": "acme"})
    done = make("SUCCESSFUL", lock_key="order:7", kwargs={"order": 7})
    make(lock_key="order:8", kwargs={"order": 70}, meta={"tenant": "acme2"})
    assert ids(client, key="order:7") == [row.pk], "by the index, which has unfinished tasks"
    assert ids(client, key="order:7", status__exact="SUCCESSFUL") == [done.pk]
    assert ids(client, argument="order=7") == [done.pk, row.pk]
    assert ids(client, argument="name=x") == ids(client, metadata="tenant=acme") == [row.pk]


def test_positional_arguments_are_found_by_name_if_a_function_is_chosen(client):
    row = make(task_path="tests.sample.tasks.echo", args=["hello"])
    [name, *_rest] = signature(echo.func).parameters
    assert ids(client, argument=f"{name}=hello") == []
    assert ids(client, argument=f"{name}=hello", task_path="tests.sample.tasks.echo") == [row.pk]


SECRET = {"kwargs": {"card": "42"}, "meta": {"redact": ["card"], "card": "42"}, "lock_key": "card:42"}


@pytest.mark.parametrize("query", [{"argument": "card=42"}, {"metadata": "card=42"}, {"key": "card:42"}])
def test_no_filter_finds_redacted_values(client, settings, query):
    """Otherwise a user could guess a hidden value, with one request for each guess."""
    make(**SECRET)
    assert ids(client, **query) == []
    row = make(**{**SECRET, "meta": {"card": "42"}})
    assert ids(client, **query) == [row.pk], "nothing of this one is redacted"
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "REDACT": lambda path, name, value: value}
    page = client.get(LIST, query)
    assert page.context["cl"].result_list == []
    assert "because REDACT may hide them" in page.content.decode()


def test_no_filter_finds_tasks_of_a_function_that_redacts_now(client, monkeypatch):
    row = make(kwargs={"card": "42"})
    monkeypatch.setattr(task_list, "redacting_paths", lambda: [row.task_path])
    assert ids(client, argument="card=42") == []


def test_functions_and_queues_are_suggestions_and_not_links(client):
    """Hundreds of links would fill the page."""
    page = client.get(LIST, {"status__exact": "FAILED", "queue": "no-such", "q": "nothing"}).content.decode()
    assert '<option value="tests.sample.tasks.nothing">' in page
    assert "?task_path=" not in page
    assert '<input type="hidden" name="status__exact" value="FAILED">' in page
    assert '<input type="hidden" name="queue" value="no-such">' in page
    assert '<input type="hidden" name="q" value="nothing">' in page
    assert page.count('name="queue"') > page.count('type="hidden" name="queue"'), "and the input itself"
