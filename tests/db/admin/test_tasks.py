"""The admin pages of tasks: fields, buttons and permissions."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.db.models.functions import Now

from django_pglock.admin import task_page
from django_pglock.admin.task_page import sentence
from django_pglock.models import Queue, Task
from django_pglock.store.release import release
from django_pglock.store.requests_to_worker import answer_stack
from tests.db.admin.visits import (
    LIST,
    add_attempt,
    logged,
    make,
    page_of,
    person,
    said,
    start_worker,
    url,
    with_csrf_checks,
)
from tests.sample import tasks

pytestmark = pytest.mark.django_db


NOT_DELETED = "1 of the selected tasks was not deleted: it is not finished, or is still needed."


def delete(client, row):
    """Confirm the deletion of one task, and return the page that follows."""
    return client.post(url("task", "verb", row.pk, "delete_finished"), {"confirmed": "1"}, follow=True)


@pytest.mark.parametrize("status", ["READY", "SCHEDULED", "RUNNING", "SUCCESSFUL", "FAILED", "CANCELLED"])
def test_the_list_and_the_task_page_can_be_opened_for_each_status(client, status):
    row = make(status)
    assert f"#{row.pk}" in client.get(LIST).content.decode()
    page = client.get(url("task", "change", row.pk))
    assert page.status_code == 200
    assert "_save" not in page.content.decode(), "nothing is edited by hand"


def test_a_button_applies_its_verb(client):
    person(client, "view_task", "retry_task")
    row = make("FAILED")
    address = url("task", "verb", row.pk, "retry")
    page = page_of(client, row)
    assert address in page
    assert "django_pglock/admin.css" in page
    assert client.post(address)["Location"] == url("task", "change", row.pk)
    row.refresh_from_db()
    assert row.status == "READY"


@pytest.mark.parametrize("verb", ["reset_stuck", "retry", "run_now", "cancel"])
@pytest.mark.parametrize("key", [2**63 - 1, 10**30])
def test_a_verb_on_a_missing_task_is_404(client, verb, key):
    person(client, "view_task", "retry_task", "cancel_task", "reset_task")
    assert client.post(url("task", "verb", key, verb)).status_code == 404
    assert not LogEntry.objects.exists()


def test_the_button_that_deletes_asks_for_confirmation(client):
    person(client, "view_task", "delete_task")
    row = make("FAILED", attempts=1)
    add_attempt(row)
    button = url("task", "verb", row.pk, "delete_finished")
    assert button in page_of(client, row)
    assert "1 finished task would be deleted, with its attempts." in client.post(button).content.decode()
    assert Task.objects.exists()
    assert not LogEntry.objects.exists()
    assert said(delete(client, row)) == ["1 task was deleted."]
    assert not Task.objects.exists()
    assert logged() == ["delete_finished: 1"]


def test_a_task_that_was_started_again_is_not_deleted(client):
    """Another user has retried the task since the question was shown."""
    person(client, "view_task", "delete_task")
    row = make("FAILED")
    Task.objects.filter(pk=row.pk).retry()
    assert said(delete(client, row)) == [NOT_DELETED]
    assert Task.objects.exists()


# The page of one task: why the task does not run, and where its key and its schedule lead.


def test_the_page_says_why_no_worker_runs_the_task(client):
    start_worker(queues=[])
    Queue.objects.pause("re&ports")
    reason = "No worker runs this task, because the queue re&amp;ports is paused. Resume the queue."
    assert f'<p class="errornote">{reason}</p>' in page_of(client, make(queue="re&ports"))


def test_a_lock_key_leads_to_its_tasks(client):
    waiting = make("BLOCKED", lock_key="order:7", waits_for=0)
    assert '<a href="../../?key=order%3A7">order:7</a>' in page_of(client, waiting)


def test_a_redacted_lock_key_is_no_link(client, settings):
    row = make("READY", lock_key="order:7")
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "REDACT": lambda path, name, value: "hidden"}
    page = page_of(client, row)
    assert "order:7" not in page
    assert "order%3A7" not in page


def test_a_task_of_a_schedule_leads_to_the_schedule(client):
    person(client, "view_task", "view_schedule")
    address = url("schedule", "change", "tests.sample.tasks.nothing")
    tick = "2026-01-01T10:00:00+00:00"
    assert f'<a href="{address}">{tick}</a>' in page_of(client, make(meta={"schedule": tick}))
    assert address not in page_of(client, make())
    assert "of a group" in page_of(client, make(group_key="of a group"))


# The summary at the top of the page of a task.


TRACE = """Traceback (most recent call last):
  File "/venv/lib/python3.12/site-packages/django_pglock/worker/child/attempt.py", line 12, in run
    return function()
  File "/srv/shop/bank.py", line 88, in charge
    connect(<bank>)
  File "/venv/lib/python3.12/site-packages/bank/client.py", line 5, in connect
    self._dial()
  File "/venv/lib/python3.12/site-packages/bank/client.py", line 9, in _dial
    raise ConnectionError("the bank is away: 503")
ConnectionError: the bank is away: 503
"""


def failed():
    row = make("FAILED", attempts=5, retries=4, max_retries=4)
    for number, trace in ((4, "the one before"), (5, TRACE)):
        add_attempt(row, number, "builtins.ConnectionError", traceback=trace)
    return row


def test_the_page_begins_with_the_last_failure_and_the_last_frame_of_the_project(client):
    row = failed()
    page = page_of(client, row)
    assert '<p class="pglock-exception">ConnectionError in bank.py:88: the bank is away: 503</p>' in page
    assert "connect(&lt;bank&gt;)" in page
    assert "at attempt 5 of 5." in page
    assert "the one before" not in page


@pytest.mark.parametrize(
    ("status", "fields", "words"),
    [
        ("SUCCESSFUL", {"attempts": 2, "retries": 1, "max_retries": 2}, "Succeeded 0 s ago, at attempt 2 of 3."),
        (
            "SUCCESSFUL",
            {"attempts": 1, "cancel_requested_at": Now()},
            "Succeeded 0 s ago, at attempt 1 of 1. A cancel was requested, but the function did not stop.",
        ),
        ("FAILED", {"attempts": 1}, "Failed 0 s ago, at attempt 1 of 1."),
        # After the death of its worker, or after retries by a person.
        ("FAILED", {"attempts": 13}, "Failed 0 s ago, at attempt 13 of 13."),
        ("READY", {"attempts": 13}, "Has been ready for 0 s. Attempts so far: 13 of 14."),
        ("CANCELLED", {}, "Was cancelled 0 s ago."),
        ("RUNNING", {"attempts": 1}, "Has been running for 0 s: attempt 1 of 1."),
        ("SCHEDULED", {"run_after": Now() + timedelta(days=2, hours=1)}, "Will be ready in 2"),
        ("SCHEDULED", {}, "Has been waiting for 0 s"),
        ("READY", {}, "Has been ready for 0 s. Attempts so far: 0 of 1."),
        ("BLOCKED", {}, "Has been waiting for 0 s"),
    ],
)
def test_the_state_is_a_sentence(status, fields, words):
    row = Task.objects.get(pk=make(status, **fields).pk)
    # On a slow machine some seconds may pass.
    text = sentence(row).replace("\xa0", " ")
    start, _, end = words.partition("0 s")
    assert text.startswith(start)
    assert text.endswith(end) or not end


def test_the_task_summary_omits_empty_fields_and_links_the_others(client):
    worker = start_worker("box 7")
    page = page_of(client, make("RUNNING", worker=worker, queue="a&b"))
    assert 'href="../../?queue=a%26b">a&amp;b</a>' in page
    assert f'href="../../../worker/{worker}/change/">box 7</a>' in page
    for absent in ("Lock key:", "Result:", "Arguments:", "Finished at:", "Rescues:"):
        assert absent not in page
    assert str(other := uuid4()) in page_of(client, make("RUNNING", worker=other)), "its row is gone"


@pytest.mark.django_db(transaction=True)
def test_tasks_before_and_after_are_linked(client):
    first = tasks.nothing.enqueue()
    second = tasks.nothing.using(after=[first]).enqueue()
    for one, other in ((first, second), (second, first)):
        link = f'<a href="{url("task", "change", other.id)}">#{other.id}</a>'
        assert link in page_of(client, Task.objects.get(pk=one.id))


def test_a_blocked_task_is_not_shown_as_an_error(client):
    assert "errornote" not in page_of(client, make("BLOCKED"))
    assert "errornote" in page_of(client, make("READY")), "no worker runs"


def test_a_task_that_was_cancelled_because_of_another_says_so_on_its_page_and_in_the_list(client):
    first = tasks.echo.enqueue(1)
    final = Task.objects.get(pk=tasks.echo.using(after=[first]).enqueue(2).id)
    Task.objects.filter(pk=first.id).cancel()
    release("default", [int(first.id)])
    page = page_of(client, final)
    assert "Was cancelled" in page
    link = f'<a href="{url("task", "change", first.id)}">#{first.id}</a>'
    assert f"Cancelled, because this task did not succeed: {link}" in page
    assert "Attempt 0" not in page
    assert f'Because of <a href="{first.id}/change/">#{first.id}</a>' in client.get(LIST).content.decode()


# The page with the stack of a running task: its permission, and its text.


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch):
    monkeypatch.setattr(task_page, "STACK_TIMEOUT", 0.0)


def address(task, page="stack"):
    return url("task", page, task.pk)


def test_requesting_a_stack_needs_its_permission_and_writes_an_audit_entry(client):
    running = make("RUNNING", attempts=1)
    person(client, "view_task", "change_task", "cancel_task", "retry_task")
    assert "Show stack" not in client.get(address(running, "change")).content.decode()
    assert [client.post(address(running)).status_code, client.get(address(running)).status_code] == [403, 403]
    person(client, "stack_task")
    assert client.post(address(running)).status_code == 403, "who may not view tasks"
    assert not Task.objects.filter(stack__isnull=False).exists()

    user = person(client, "view_task", "stack_task")
    assert "Show stack" in client.get(address(running, "change")).content.decode()
    assert "Nobody has asked" in client.get(address(running)).content.decode()
    assert not Task.objects.filter(stack__isnull=False).exists(), "to look is not to ask"
    assert client.post(address(running)).headers["Location"] == address(running)
    assert Task.objects.get(stack__isnull=False).pk == running.pk
    entry = LogEntry.objects.get()
    assert (entry.user, entry.object_id, entry.change_message) == (user, str(running.pk), "stack: asked for")
    assert client.put(address(running)).status_code == 405

    assert with_csrf_checks(user).post(address(running)).status_code == 403


def test_the_page_says_what_the_worker_has_answered(client):
    running = make("RUNNING", attempts=3)
    person(client, "view_task", "stack_task")
    client.post(address(running))
    assert "has not answered" in client.get(address(running)).content.decode()
    answer_stack("default", running.pk, 3, running.worker, '  File "bank.py", line 88, in <module>\n    charge()')
    page = client.get(address(running)).content.decode()
    assert "line 88, in &lt;module&gt;" in page
    assert "Claim 3" in page
    assert not [each for each in (" style=", "onclick", "<script>") if each in page]
    client.post(address(running))
    assert "has not answered" in client.get(address(running)).content.decode(), "to the new request"
    answer_stack("default", running.pk, 3, running.worker, "")
    assert "the function does not run" in client.get(address(running)).content.decode()


@pytest.mark.parametrize("status", ["READY", "SUCCESSFUL", "FAILED"])
def test_only_a_running_task_has_the_button(client, status):
    row = make(status)
    person(client, "view_task", "stack_task")
    assert "Show stack" not in client.get(address(row, "change")).content.decode()
    answer = client.post(address(row), follow=True)
    assert answer.redirect_chain == [(address(row, "change"), 302)]
    assert [str(each) for each in answer.context["messages"]] == ["The task does not run any more."]
    assert not LogEntry.objects.exists()
    assert client.get(url("task", "stack", 10**12)).status_code == 404
