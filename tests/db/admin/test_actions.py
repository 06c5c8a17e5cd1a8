"""Actions on tasks: what each changes, its permission, its message and its log entry."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_pglock.admin import actions, pages
from django_pglock.models import Task
from django_pglock.store import cancel as cancel_module
from django_pglock.store import move
from django_pglock.store.liveness import beat
from tests.db.admin.visits import LIST, act, make, person, said

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    ("action", "permission", "before", "after"),
    [
        ("retry", "retry_task", "FAILED", "READY"),
        ("retry", "retry_task", "CANCELLED", "READY"),
        ("run_now", "retry_task", "SCHEDULED", "READY"),
        ("cancel", "cancel_task", "READY", "CANCELLED"),
        ("cancel", "cancel_task", "BLOCKED", "CANCELLED"),
        ("reset_stuck", "reset_task", "RUNNING", "READY"),
    ],
)
def test_an_action_does_its_one_thing_with_its_own_permission(client, action, permission, before, after):
    row = make(before)
    person(client, "view_task")
    act(client, action, row)
    client.post(reverse("admin:django_pglock_task_verb", args=[row.pk, action]))
    row.refresh_from_db()
    assert row.status == before, "to look is not to touch"

    person(client, "view_task", permission)
    response = act(client, action, row)
    row.refresh_from_db()
    assert row.status == after
    assert any(text.startswith("1 ") for text in said(response))
    assert LogEntry.objects.count() == 1


def test_what_runs_is_asked_to_end_and_the_pages_say_so(client):
    person(client, "view_task", "cancel_task")
    row = make("RUNNING", progress={"done": 3, "total": 12})
    response = act(client, "cancel", row)
    assert said(response) == ["1 task was cancelled, or asked to end if it runs."]
    row.refresh_from_db()
    assert row.status == "RUNNING"
    for url in (LIST, reverse("admin:django_pglock_task_change", args=[row.pk])):
        assert "cancel requested" in client.get(url).content.decode()
    assert "&quot;total&quot;: 12" in client.get(url).content.decode()


def test_an_action_says_what_it_did_not_change(client):
    person(client, "view_task", "retry_task")
    response = act(client, "retry", make("FAILED"), make("SUCCESSFUL"), make("READY"))
    assert said(response)[0] == "1 task will run again."
    assert said(response)[1].startswith("2 of the selected tasks were not changed")


def test_a_message_about_one_unchanged_task_is_in_the_singular(client):
    person(client, "view_task", "retry_task", "reset_task")
    [text] = said(act(client, "retry", make("READY")))
    assert text.startswith("1 of the selected tasks was not changed: it is")
    [text] = said(act(client, "reset_stuck", make("FAILED")))
    assert text.startswith("1 of the selected tasks was not changed: its worker is alive")


def test_what_is_beyond_the_count_is_not_said_to_be_known(client, monkeypatch):
    monkeypatch.setattr(pages, "MOST_COUNTED", 3)
    monkeypatch.setattr("django_pglock.admin.tasks.TaskAdmin.list_per_page", 2)
    person(client, "view_task", "retry_task")
    rows = [*(make("FAILED") for _ in range(4)), *(make() for _ in range(4))]
    data = {"action": "retry", "_selected_action": [rows[0].pk], "select_across": "1"}
    texts = said(client.post(LIST, data, follow=True))
    assert texts == [
        "4 tasks will run again.",
        "More than 3 tasks were selected. Tasks in other states were not changed.",
    ]


def test_all_of_nothing_is_nothing(client):
    """If no row matches when the action arrives, no verb is applied."""
    person(client, "view_task", "cancel_task")
    row = make()
    data = {"action": "cancel", "_selected_action": [row.pk], "select_across": "1"}
    response = client.post(f"{LIST}?q={'9' * 30}", data, follow=True)
    assert response.status_code == 200
    row.refresh_from_db()
    assert row.status == "READY"


def test_the_audit_entry_names_up_to_a_hundred_tasks(client):
    user = person(client, "view_task", "retry_task")
    one = make("FAILED")
    act(client, "retry", one)
    entry = LogEntry.objects.get(user=user)
    assert (entry.object_id, entry.change_message) == (str(one.pk), "retry: 1")
    history = client.get(reverse("admin:django_pglock_task_history", args=[one.pk])).content.decode()
    assert "retry: 1" in history

    two = [make("FAILED"), make("FAILED")]
    act(client, "retry", *two)
    entry = LogEntry.objects.exclude(pk=entry.pk).get()
    assert entry.object_id is None
    assert entry.change_message == f"retry: 2 of #{two[0].pk}, #{two[1].pk}"

    LogEntry.objects.all().delete()
    rows = [make("FAILED") for _ in range(101)]
    client.post(LIST, {"action": "retry", "_selected_action": [rows[0].pk], "select_across": "1"})
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.change_message) == (None, "retry: 101")


@pytest.mark.django_db(transaction=True)
def test_a_crowd_is_no_single_transaction_and_audited_from_its_beginning(client, monkeypatch):
    """If the process dies halfway, the changed rows stay changed, and the log says who asked for it."""
    for module in (actions, move):
        monkeypatch.setattr(module, "WINDOW", 2)
    person(client, "view_task", "cancel_task")
    rows = [make("READY") for _ in range(5)]
    act(client, "cancel", *rows[:3])
    texts = list(LogEntry.objects.order_by("pk").values_list("change_message", flat=True))
    assert texts == [
        "cancel: started for more than 2 rows",
        f"cancel: 3 of #{rows[0].pk}, #{rows[1].pk}, #{rows[2].pk}",
    ]

    cancel = cancel_module._cancel
    monkeypatch.setattr(cancel_module, "_cancel", lambda chosen: cancel(chosen) and 1 // 0)
    rows += [make("READY")]
    with pytest.raises(ZeroDivisionError):
        act(client, "cancel", *rows[3:])
    assert list(Task.objects.filter(status="READY")) == [rows[3]], "the newest first"
    assert LogEntry.objects.count() == 3


def test_what_cannot_be_audited_is_not_done(client, monkeypatch):
    person(client, "view_task", "retry_task")
    row = make("FAILED")

    def refuse(*args, **kwargs):
        raise RuntimeError("no room for the audit")

    monkeypatch.setattr("django_pglock.admin.actions.record", refuse)
    with pytest.raises(RuntimeError, match="no room"):
        act(client, "retry", row)
    row.refresh_from_db()
    assert row.status == "FAILED"


def test_only_what_is_stuck_is_reset(client, slow_beats):
    """Of two running tasks, one has a living worker."""
    person(client, "view_task", "reset_task")
    living = uuid4()
    beat("default", living, name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)
    safe, stuck = make("RUNNING", worker=living), make("RUNNING")
    assert f"#{safe.pk}<" not in client.get(LIST + "?attention=stuck").content.decode()
    act(client, "reset_stuck", safe, stuck)
    assert list(Task.objects.order_by("pk").values_list("status", flat=True)) == ["RUNNING", "READY"]


def test_all_that_match_are_one_statement_and_one_audit_entry(client, monkeypatch):
    monkeypatch.setattr("django_pglock.admin.tasks.TaskAdmin.list_per_page", 5)
    person(client, "view_task", "cancel_task")
    rows = [make() for _ in range(20)]
    data = {"action": "cancel", "_selected_action": [rows[0].pk], "select_across": "1"}
    with CaptureQueriesContext(connection) as queries:
        client.post(LIST, data)
    assert Task.objects.filter(status="CANCELLED").count() == 20
    assert sum('UPDATE "django_pglock_task"' in query["sql"] for query in queries) == 1
    assert LogEntry.objects.count() == 1
