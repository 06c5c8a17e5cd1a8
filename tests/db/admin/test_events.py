"""The admin page of events: the list, the form that emits one, and what is redacted."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from django_pglock import emit
from django_pglock.admin import task_list
from django_pglock.models import Event, Step, Task
from django_pglock.tasks import registry
from django_pglock.testing import run_tasks
from tests.db.admin.visits import LIST, ids, logged, page_of, person, said, url, with_csrf_checks
from tests.sample import step_tasks, tasks

pytestmark = pytest.mark.django_db(transaction=True)

PAGE = url("event")
FORM = url("event", "emit")


def names(client, **query):
    return [row.name for row in client.get(PAGE, query).context["cl"].result_list]


def test_the_list_shows_the_newest_first_and_finds_names_by_their_beginning(client):
    person(client, "view_event")
    for name in ("packed:8", "packed:7", "unpacked:7", "Packed"):
        emit(name, {"of": name})
    assert names(client) == ["Packed", "unpacked:7", "packed:7", "packed:8"]
    assert names(client, q="packed") == ["packed:7", "packed:8"]
    assert names(client, q="pack%") == []
    assert "{&quot;of&quot;: &quot;packed:7&quot;}" in client.get(PAGE).content.decode()
    assert "Tasks that wait for it" in page_of(client, Event.objects.get(name="packed:7"))


def test_a_person_emits_an_event_and_the_waiting_task_continues(client):
    result = step_tasks.aorder.enqueue(7)
    run_tasks(until="due")
    person(client, "view_event")
    assert "Emit" not in client.get(PAGE).content.decode()
    assert client.get(FORM).status_code == client.post(FORM, {"name": "x"}).status_code == 403
    user = person(client, "view_event", "add_event")
    assert FORM in client.get(PAGE).content.decode()
    assert with_csrf_checks(user).post(FORM, {"name": "x"}).status_code == 403
    answer = client.post(FORM, {"name": "packed:7", "payload": '{"weight": 3}'}, follow=True)
    assert said(answer) == ["The event packed:7 was emitted."]
    assert logged() == ["emit: packed:7"]
    assert Task.objects.get(pk=result.id).status == "READY"
    run_tasks(until="due")
    assert Task.objects.get(pk=result.id).result[1] == {"weight": 3}


def test_an_event_that_is_there_is_not_changed(client):
    person(client, "view_event", "add_event")
    emit("once", 1)
    answer = client.post(FORM, {"name": "once", "payload": "2"}, follow=True)
    assert said(answer) == ["The event once is there already, so nothing was changed."]
    assert (Event.objects.get().payload, logged()) == (1, [])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": "a", "payload": "{"}, "Enter a valid JSON."),
        ({"name": "", "payload": "1"}, "This field is required."),
        ({"name": "a" * 201}, "at most 200 characters"),
        ({"name": "a", "payload": '"\\u0000"'}, "errornote"),
    ],
)
def test_what_cannot_be_emitted_is_refused_with_the_reason(client, fields, text):
    person(client, "view_event", "add_event")
    page = client.post(FORM, fields).content.decode()
    assert text in page or "errorlist" in page
    assert not Event.objects.exists()


def test_an_event_is_deleted_with_its_permission(client):
    emit("packed:7")
    address = url("event", "delete", "packed_3A7")
    person(client, "view_event")
    assert client.post(address, {"post": "yes"}).status_code == 403
    person(client, "view_event", "delete_event")
    assert client.post(address, {"post": "yes"}).status_code == 302
    assert not Event.objects.exists()


@pytest.mark.parametrize(
    ("redact", "is_shown"), [(("packed",), False), (("packed:7",), False), (True, False), ((), True), (("pack",), True)]
)
def test_a_payload_is_hidden_if_a_known_function_hides_it(client, monkeypatch, redact, is_shown):
    """By the name of the event, or by its part before a colon."""
    person(client, "view_event", "view_task")
    monkeypatch.setitem(registry._definitions, step_tasks.aorder.module_path, replace(step_tasks.aorder, redact=redact))
    emit("packed:7", "in the attic")
    result = step_tasks.aorder.enqueue(7)
    run_tasks()
    page = client.get(PAGE).content.decode()
    assert ("in the attic" in page, "[redacted]" in page) == (is_shown, not is_shown)
    [_charge, packed] = client.get(url("task", "change", result.id)).context["pglock_steps"]
    assert packed["said"] == ('"in the attic"' if is_shown else '"[redacted]"')


def test_the_setting_redact_hides_payloads(client, settings):
    person(client, "view_event")
    settings.DJANGO_PGLOCK = {"REDACT": "tests.db.admin.test_events.hide"}
    emit("packed:7", {"place": "in the attic"})
    assert "in the attic" not in client.get(PAGE).content.decode()


def hide(path, name, value):
    return "***" if name == "place" else value


def test_tasks_are_listed_by_what_suspends_them(client):
    person(client, "view_task")
    waiting, sleeping = step_tasks.aorder.enqueue(7), step_tasks.order.enqueue(8)
    run_tasks(until="due")
    later = step_tasks.order.using(run_after=Task.objects.get(pk=sleeping.id).run_after).enqueue(9)
    assert ids(client, suspended="SCHEDULED") == [int(sleeping.id), int(waiting.id)]
    assert ids(client, event="packed:7") == [int(waiting.id)]
    assert ids(client, event="packed:7", id__lt=waiting.id) == []
    assert ids(client, event="packed") == []
    Task.objects.filter(pk=waiting.id).cancel()
    assert ids(client, event="packed:7") == []
    assert int(later.id) in ids(client, status__exact="SCHEDULED")
    assert ids(client, suspended="BLOCKED") == ids(client, suspended="yes") == []


def test_the_children_of_a_task_are_listed_linked_and_counted(client, monkeypatch):
    person(client, "view_task", "cancel_task")
    calls = [tasks.nothing.using(run_after=timedelta(days=1)) for _ in range(3)]
    monkeypatch.setattr(step_tasks, "CHILDREN", [each.call_of() for each in calls])
    parent = step_tasks.family.enqueue()
    run_tasks(until="due")
    assert ids(client, suspended="BLOCKED") == [int(parent.id)]
    page = page_of(client, Task.objects.get(pk=parent.id))
    children = Step.objects.get(task=parent.id).result["children"]
    assert "Of 3 tasks for which it waits or waited, 0 have ended; 0 of them did not succeed." in page
    assert all(f'<a href="{url("task", "change", each)}">#{each}</a>' in page for each in children)
    answer = client.post(url("task", "verb", parent.id, "cancel"), follow=True)
    assert said(answer) == ["1 task was cancelled, or asked to end if it runs."], "the children need no question"
    assert {each.status for each in Task.objects.all()} == {"CANCELLED"}


def test_more_tasks_wait_for_an_event_than_a_page_searches(client, monkeypatch):
    monkeypatch.setattr(task_list, "MOST_WAITING", 3)
    person(client, "view_task")
    waiting = [int(step_tasks.aorder.enqueue(7).id) for _ in range(5)]
    run_tasks(until="due")
    page = client.get(LIST, {"event": "packed:7"})
    assert "Only the newest 3 tasks were searched" in page.content.decode()
    found = []
    while (shown := page.context["cl"]).older_query:
        found += [row.pk for row in shown.result_list]
        page = client.get(f"{LIST}{shown.older_query}")
    assert [*found, *(row.pk for row in shown.result_list)] == waiting[::-1]
