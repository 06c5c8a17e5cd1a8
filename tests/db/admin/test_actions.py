"""Actions on tasks: what each changes, its permission, its message and its log entry."""

from __future__ import annotations

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_pglock.admin import pages
from django_pglock.models import Task, Waiter
from django_pglock.store.bulk import change_tasks, enqueue_change
from django_pglock.store.operate import DELETE, MOVE
from django_pglock.store.release import DEPENDENCY_FAILED
from tests.db.admin.visits import LIST, act, add_attempt, logged, make, page_of, person, said, start_worker, url

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
def test_an_action_changes_the_status(client, action, permission, before, after):
    row = make(before)
    person(client, "view_task", permission)
    response = act(client, action, row)
    row.refresh_from_db()
    assert row.status == after
    assert any(text.startswith("1 ") for text in said(response))
    assert logged() == [f"{action}: 1"]


def test_a_cancel_of_a_running_task_is_requested_and_shown(client):
    person(client, "view_task", "cancel_task")
    row = make("RUNNING", progress={"done": 3, "total": 12})
    response = act(client, "cancel", row)
    assert said(response) == ["1 task was cancelled, or asked to end if it runs."]
    row.refresh_from_db()
    assert row.status == "RUNNING"
    for each in (LIST, url("task", "change", row.pk)):
        assert "cancel requested" in client.get(each).content.decode()
    assert "&quot;total&quot;: 12" in page_of(client, row)


def test_an_action_says_what_it_did_not_change(client):
    person(client, "view_task", "retry_task")
    response = act(client, "retry", make("FAILED"), make("SUCCESSFUL"), make("READY"))
    assert said(response)[0] == "1 task will run again."
    assert said(response)[1] == (
        "2 of the selected tasks were not changed: they are neither failed nor cancelled, or other tasks have their "
        "unique keys."
    )


ALL = {"select_across": "1", "confirmed": "1"}


def test_an_action_on_all_matching_tasks_needs_a_confirmation_with_their_number(client, monkeypatch):
    """The page shows a hundred of the tasks, and one click selects the others."""
    monkeypatch.setattr("django_pglock.admin.tasks.TaskAdmin.list_per_page", 2)
    person(client, "view_task", "retry_task")
    rows = [*(make("FAILED") for _ in range(4)), *(make() for _ in range(4))]
    data = {"action": "retry", "_selected_action": [rows[0].pk], "select_across": "1"}
    page = client.post(f"{LIST}?status__exact=FAILED", data)
    assert "4 tasks would run again." in page.content.decode()
    assert not LogEntry.objects.exists()
    fields = dict(page.context["fields"])
    assert said(client.post(f"{LIST}?status__exact=FAILED", {**fields, "confirmed": "1"}, follow=True)) == [
        "4 tasks will run again."
    ]
    assert Task.objects.filter(status="FAILED").count() == 0


def test_the_audit_entry_names_up_to_a_hundred_tasks(client):
    user = person(client, "view_task", "retry_task")
    one = make("FAILED")
    act(client, "retry", one)
    entry = LogEntry.objects.get(user=user)
    assert (entry.object_id, entry.change_message) == (str(one.pk), "retry: 1")
    history = client.get(url("task", "history", one.pk)).content.decode()
    assert "retry: 1" in history

    two = [make("FAILED"), make("FAILED")]
    act(client, "retry", *two)
    entry = LogEntry.objects.exclude(pk=entry.pk).get()
    assert entry.object_id is None
    assert entry.change_message == f"retry: 2 of #{two[0].pk}, #{two[1].pk}"

    LogEntry.objects.all().delete()
    rows = [make("FAILED") for _ in range(101)]
    client.post(LIST, {"action": "retry", "_selected_action": [rows[0].pk], **ALL})
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.change_message) == (None, "retry: 101")


def test_an_action_on_many_tasks_enqueues_a_task_that_changes_them(client, monkeypatch):
    """A request that retries a hundred thousand tasks would be cut off by a proxy, and no user could stop it."""
    monkeypatch.setattr(pages, "WINDOW", 2)
    person(client, "view_task", "cancel_task")
    rows = [make("READY") for _ in range(3)]
    response = act(client, "cancel", *rows)
    change = Task.objects.latest("pk")
    [text] = said(response)
    assert "for 3 tasks" in text
    assert url("task", "change", change.pk) in text
    assert (change.task_path, change.priority) == ("django_pglock.store.bulk.change_tasks", 100)
    assert change.args == ["cancel", [row.pk for row in reversed(rows)]], "the newest first"
    assert LogEntry.objects.get().change_message == f"cancel: asked for 3 tasks, to be changed by #{change.pk}"
    assert Task.objects.filter(status="READY").count() == 4, "nothing has changed yet"

    act(client, "cancel", *(make("SUCCESSFUL") for _ in range(3)))
    assert Task.objects.latest("pk").status == "SUCCESSFUL", "nothing can be cancelled, so there is no task for it"


def test_an_action_that_cannot_be_audited_is_not_done(client, monkeypatch):
    person(client, "view_task", "retry_task")
    row = make("FAILED")

    def refuse(*args, **kwargs):
        raise RuntimeError("no space for the audit")

    monkeypatch.setattr("django_pglock.admin.pages.record", refuse)
    with pytest.raises(RuntimeError, match="no space"):
        act(client, "retry", row)
    row.refresh_from_db()
    assert row.status == "FAILED"


def test_reset_changes_only_stuck_tasks(client, slow_beats):
    """One of the two running tasks has a living worker."""
    person(client, "view_task", "reset_task")
    safe, stuck = make("RUNNING", worker=start_worker()), make("RUNNING")
    assert f"#{safe.pk}<" not in client.get(LIST + "?attention=stuck").content.decode()
    act(client, "reset_stuck", safe, stuck)
    assert list(Task.objects.order_by("pk").values_list("status", flat=True)) == ["RUNNING", "READY"]


def test_an_action_on_all_matching_tasks_is_one_update_and_one_audit_entry(client, monkeypatch):
    monkeypatch.setattr("django_pglock.admin.tasks.TaskAdmin.list_per_page", 5)
    person(client, "view_task", "cancel_task")
    rows = [make() for _ in range(20)]
    data = {"action": "cancel", "_selected_action": [rows[0].pk], **ALL}
    with CaptureQueriesContext(connection) as queries:
        client.post(LIST, data)
    assert Task.objects.filter(status="CANCELLED").count() == 20
    assert sum('UPDATE "django_pglock_task"' in query["sql"] for query in queries) == 1
    assert LogEntry.objects.count() == 1


def test_waiting_tasks_are_moved_to_a_queue_that_a_page_asks_for(client):
    row, running = make(), make("RUNNING")
    data = {"action": "move_to_queue", "_selected_action": [row.pk, running.pk]}
    person(client, "view_task", "change_task")
    page = client.post(LIST, data)
    assert "1 waiting task would be moved, unless it is in that queue already." in page.content.decode()
    assert 'name="value"' in page.content.decode()
    assert not LogEntry.objects.exists()
    fields = {**data, "confirmed": "1"}
    assert "queue" in said(client.post(LIST, {**fields, "value": " \x00"}, follow=True))[0]
    messages = said(client.post(LIST, {**fields, "value": "other"}, follow=True))
    assert messages[0] == "1 task was moved."
    assert messages[1].startswith("1 of the selected tasks was not moved")
    assert [Task.objects.get(pk=each.pk).queue for each in (row, running)] == ["other", "default"]
    assert LogEntry.objects.get().change_message.startswith("move_to_queue other: 1 of ")


def test_deleting_finished_tasks_asks_for_confirmation_only_for_all_matching_tasks(client):
    rows = [make("FAILED"), make("READY")]
    person(client, "view_task", "delete_task")
    page = client.get(LIST).content.decode()
    assert "delete_finished" in page
    assert "delete_selected" not in page
    page = client.post(LIST, {"action": "delete_finished", "_selected_action": [rows[0].pk], "select_across": "1"})
    assert "1 finished task would be deleted" in page.content.decode()
    messages = said(act(client, "delete_finished", *rows))
    assert messages[0] == "1 task was deleted."
    assert "was not deleted" in messages[1]
    assert list(Task.objects.values_list("pk", flat=True)) == [rows[1].pk]
    assert LogEntry.objects.get().change_message.startswith("delete_finished: 1 of ")


@pytest.mark.django_db(transaction=True)
def test_enqueued_bulk_changes_move_and_delete_tasks(worker, eventually):
    waiting, failed = make(queue="elsewhere"), make("FAILED", queue="elsewhere")
    enqueue_change("default", MOVE, [waiting.pk, failed.pk], "other")
    enqueue_change("default", DELETE, [waiting.pk, failed.pk])
    worker(queues=["default"])
    eventually(lambda: Task.objects.filter(task_path=change_tasks.module_path, status="SUCCESSFUL").count() == 2)
    assert Task.objects.get(pk=waiting.pk).queue == "other"
    assert not Task.objects.filter(pk=failed.pk).exists()


def cancelled_after(*parts):
    """Return a task that was cancelled because of the first of these."""
    final = make("CANCELLED", meta={"after": [each.pk for each in parts]})
    add_attempt(final, 0, DEPENDENCY_FAILED, cause=parts[0].pk)
    return final


def test_a_retry_offers_what_was_cancelled_because_of_the_task(client):
    """A fan-in of which one part was repaired: without this, the final task would stay cancelled."""
    person(client, "view_task", "retry_task")
    part = make("FAILED")
    final = cancelled_after(part)
    button = url("task", "verb", part.pk, "retry")
    for question in (client.post(button), act(client, "retry", part)):
        page = question.content.decode()
        assert "1 task would run again." in page
        assert "checked> And 1 task that was cancelled because of it." in page
    data = {"action": "retry", "_selected_action": [part.pk], "confirmed": "1"}
    assert said(client.post(LIST, data, follow=True)) == ["1 task will run again."]
    assert Task.objects.get(pk=final.pk).status == "CANCELLED"
    Task.objects.filter(pk=part.pk).update(status="FAILED", finished_at=Now())
    assert said(client.post(button, {"confirmed": "1", "related": "1"}, follow=True)) == ["2 tasks will run again."]
    assert [each.status for each in Task.objects.order_by("pk")] == ["READY", "BLOCKED"]


def test_a_retry_names_why_a_task_stays_cancelled(client):
    person(client, "view_task", "retry_task")
    part, other = make("FAILED"), make("FAILED")
    cancelled_after(part, other)
    remark = (
        "1 task stays cancelled, because it was to run after other tasks that did not succeed: "
        f"#{other.pk}. Retry these as well."
    )
    assert said(act(client, "retry", part)) == ["1 task will run again.", remark]


def test_a_cancel_offers_the_unfinished_parts(client):
    person(client, "view_task", "cancel_task")
    part = make("READY")
    final = make("BLOCKED", waits_for=1, meta={"after": [part.pk]})
    Waiter.objects.create(awaited=part.pk, task=final)
    button = url("task", "verb", final.pk, "cancel")
    page = client.post(button).content.decode()
    assert "> And 1 unfinished task for which no other task waits." in page
    assert "checked" not in page
    client.post(button, {"confirmed": "1", "related": "1"})
    assert {each.status for each in Task.objects.all()} == {"CANCELLED"}
