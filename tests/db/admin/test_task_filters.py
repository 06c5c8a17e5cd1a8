"""The filters of the list of tasks: what they find, what they refuse, and what they never find."""

from __future__ import annotations

from inspect import signature
from uuid import uuid4

import pytest

from django_pglock.admin import task_filters
from django_pglock.store.liveness import beat
from tests.db.admin.visits import LIST, ids, make, person
from tests.sample.tasks import echo

pytestmark = pytest.mark.django_db


def test_the_time_of_enqueueing_limits_the_list(client):
    person(client, "view_task")
    early, late = make(enqueued_at="2026-01-01T10:00Z"), make(enqueued_at="2026-01-02T10:00Z")
    assert ids(client, since="2026-01-01T10:00:01") == [late.pk]
    assert ids(client, since="2026-01-01T10:00") == [late.pk, early.pk]
    assert ids(client, before="2026-01-02T10:00") == [early.pk]
    assert ids(client, since="2026-01-01T11:00", before="2026-01-02T09:00") == []
    assert ids(client, since="2026-01-01", queue="default", status__exact="READY") == [late.pk, early.pk]


def test_the_task_list_shows_a_message_if_a_filter_value_is_invalid(client):
    """Otherwise an action on the whole list would change tasks that the filter should exclude."""
    person(client, "view_task")
    page = client.get(LIST, {"argument": "order_id 7"}, follow=True).content.decode()
    assert "A filter could not be read, so the list is not filtered." in page
    assert "could not be read" not in client.get(LIST).content.decode()


@pytest.mark.parametrize("name", ["since", "before"])
@pytest.mark.parametrize("moment", ["0001-01-01T00:00", "9999-12-31T23:59", "0001-01-01T00:00+14:00"])
def test_a_moment_at_the_end_of_the_calendar_is_refused_like_other_invalid_values(client, name, moment):
    person(client, "view_task")
    make()
    assert client.get(LIST, {name: moment}).status_code in (200, 302)


def test_tasks_whose_ids_are_not_in_order_of_time_are_found_by_time(client):
    """A transaction may get its ids first and commit last."""
    person(client, "view_task")
    late, early = make(enqueued_at="2026-01-01T10:00:30Z"), make(enqueued_at="2026-01-01T10:00:00Z")
    assert ids(client, since="2026-01-01T10:00:10") == [late.pk]
    assert ids(client, before="2026-01-01T10:00:10") == [early.pk]


def test_the_tasks_of_a_worker_are_found_by_its_name_and_by_its_id(client):
    person(client, "view_task")
    worker = uuid4()
    beat("default", worker, name="mail-1", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)
    mine, done, _other = make("RUNNING", worker=worker), make("SUCCESSFUL", worker=worker), make("RUNNING")
    assert ids(client, worker="mail-1") == ids(client, worker=str(worker)) == [done.pk, mine.pk]
    assert ids(client, worker="mail-1", status__exact="RUNNING") == [mine.pk]
    assert ids(client, worker="nobody") == []


def test_keys_arguments_and_metadata_are_found_by_equality(client):
    person(client, "view_task")
    row = make(lock_key="order:7", kwargs={"order": 7, "name": "x"}, meta={"tenant": "acme"})
    done = make("SUCCESSFUL", lock_key="order:7", kwargs={"order": 7})
    make(lock_key="order:8", kwargs={"order": 70}, meta={"tenant": "acme2"})
    assert ids(client, key="order:7") == [row.pk], "by the index, which has unfinished tasks"
    assert ids(client, key="order:7", status__exact="SUCCESSFUL") == [done.pk]
    assert ids(client, argument="order=7") == [done.pk, row.pk]
    assert ids(client, argument="name=x") == ids(client, metadata="tenant=acme") == [row.pk]


def test_positional_arguments_are_found_by_name_if_a_function_is_chosen(client):
    person(client, "view_task")
    row = make(task_path="tests.sample.tasks.echo", args=["hello"])
    [name, *_rest] = signature(echo.func).parameters
    assert ids(client, argument=f"{name}=hello") == []
    assert ids(client, argument=f"{name}=hello", task_path="tests.sample.tasks.echo") == [row.pk]


SECRET = {"kwargs": {"card": "42"}, "meta": {"redact": ["card"], "card": "42"}, "lock_key": "card:42"}


@pytest.mark.parametrize("query", [{"argument": "card=42"}, {"metadata": "card=42"}, {"key": "card:42"}])
def test_no_filter_finds_redacted_values(client, settings, query):
    """Otherwise a user could guess a hidden value, with one request for each guess."""
    person(client, "view_task")
    make(**SECRET)
    assert ids(client, **query) == []
    row = make(**{**SECRET, "meta": {"card": "42"}})
    assert ids(client, **query) == [row.pk], "nothing of this one is redacted"
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "REDACT": lambda path, name, value: value}
    page = client.get(LIST, query)
    assert page.context["cl"].result_list == []
    assert "because REDACT may hide them" in page.content.decode()


def test_no_filter_finds_tasks_of_a_function_that_redacts_now(client, monkeypatch):
    person(client, "view_task")
    row = make(kwargs={"card": "42"})
    monkeypatch.setattr(task_filters, "redacting_paths", lambda: [row.task_path])
    assert ids(client, argument="card=42") == []


def test_functions_and_queues_are_suggestions_and_not_links(client):
    """Hundreds of links would fill the page."""
    person(client, "view_task")
    page = client.get(LIST, {"status__exact": "FAILED", "queue": "no-such", "q": "nothing"}).content.decode()
    assert '<option value="tests.sample.tasks.nothing">' in page
    assert "?task_path=" not in page
    assert '<input type="hidden" name="status__exact" value="FAILED">' in page
    assert '<input type="hidden" name="queue" value="no-such">' in page
    assert '<input type="hidden" name="q" value="nothing">' in page
    assert page.count('name="queue"') > page.count('type="hidden" name="queue"'), "and the input itself"
