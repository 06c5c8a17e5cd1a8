"""The summary at the top of the page of a task."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.db.models.functions import Now

from django_pglock.admin.task_page import sentence
from django_pglock.models import Task
from django_pglock.store.release import release
from tests.db.admin.visits import LIST, add_attempt, make, page_of, person, start_worker, url
from tests.sample import tasks

pytestmark = pytest.mark.django_db

TRACE = """Traceback (most recent call last):
  File "/venv/lib/python3.12/site-packages/django_pglock/worker/child/run.py", line 12, in run
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
    person(client, "view_task")
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
        ("FAILED", {"attempts": 13}, "Failed 0 s ago, at attempt 1 of 1."),
        ("READY", {"attempts": 13}, "Has been ready for 0 s. Attempts so far: 0 of 1."),
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
    person(client, "view_task")
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
    person(client, "view_task")
    for one, other in ((first, second), (second, first)):
        link = f'<a href="{url("task", "change", other.id)}">#{other.id}</a>'
        assert link in page_of(client, Task.objects.get(pk=one.id))


def test_a_blocked_task_is_not_shown_as_an_error(client):
    person(client, "view_task")
    assert "errornote" not in page_of(client, make("BLOCKED"))
    assert "errornote" in page_of(client, make("READY")), "no worker runs"


def test_a_task_that_was_cancelled_because_of_another_says_so_on_its_page_and_in_the_list(client):
    person(client, "view_task")
    first = tasks.echo.enqueue(1)
    final = Task.objects.get(pk=tasks.echo.using(after=[first]).enqueue(2).id)
    Task.objects.filter(pk=first.id).cancel()
    release("default", [int(first.id)])
    reason = f"This task was to run after task {first.id}, which did not succeed or was deleted."
    page = page_of(client, final)
    assert "Was cancelled" in page
    assert f"DependencyFailed: {reason}</p>" in page
    assert "Attempt 0" not in page
    assert reason in client.get(LIST).content.decode()
