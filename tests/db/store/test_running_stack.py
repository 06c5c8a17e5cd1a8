"""Requests for the stacks of running tasks: which worker gets them, and which answer counts."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from uuid import uuid4

import pytest
from django.db.models.functions import Now

from django_pglock.models import RunningStack, Task
from django_pglock.store import running_stack
from django_pglock.store.requests_to_worker import requests_to
from django_pglock.store.running_stack import KEPT_FOR, answer_stack, request_stack, stack_of, wait_for_stack
from django_pglock.store.wake import REQUEST_CHANNEL
from tests.conftest import NEVER
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_only_the_worker_of_a_running_task_is_asked(mine, session):
    waiting = tasks.nothing.enqueue()
    assert request_stack("default", waiting.id) is False
    assert request_stack("default", 10**12) is False
    session.ensure_connection()
    session.connection.execute(f"LISTEN {REQUEST_CHANNEL}")
    assert request_stack("default", mine.id) is True
    [note] = session.connection.notifies(timeout=NEVER, stop_after=1)
    assert note.payload == str(mine.id)
    assert requests_to("default", mine.worker).stacks == [(mine.id, mine.attempt)]
    assert requests_to("default", uuid4()).stacks == []


def test_an_answer_counts_once_and_only_from_the_attempt_that_was_asked(mine, monkeypatch):
    request_stack("default", mine.id)
    answer_stack("default", mine.id, mine.attempt + 1, mine.worker, "of another attempt")
    answer_stack("default", mine.id, mine.attempt, uuid4(), "of another worker")
    assert stack_of("default", mine.id).answered_at is None
    slept = []
    time = SimpleNamespace(monotonic=iter((0.0, 0.5, 1.0)).__next__, sleep=slept.append)
    with monkeypatch.context() as patch:
        patch.setattr(running_stack, "time", time)
        assert wait_for_stack("default", mine.id, timeout=1).answered_at is None
    assert slept == [running_stack.CHECK_INTERVAL]
    answer_stack("default", mine.id, mine.attempt, mine.worker, "here")
    answer_stack("default", mine.id, mine.attempt, mine.worker, "too late")
    assert wait_for_stack("default", mine.id, timeout=120).stack == "here"
    assert requests_to("default", mine.worker).stacks == []


def test_a_new_request_for_a_stack_replaces_the_previous_one(mine):
    request_stack("default", mine.id)
    answer_stack("default", mine.id, mine.attempt, mine.worker, "here")
    Task.objects.update(attempts=mine.attempt + 1)
    request_stack("default", mine.id)
    row = RunningStack.objects.get()
    assert (row.attempt, row.stack, row.answered_at) == (mine.attempt + 1, "", None)


def test_old_stacks_are_deleted_by_the_next_request(mine):
    rows = {"attempt": 1, "worker": uuid4(), "stack": ""}
    old, young = 10**9, 10**9 + 1
    RunningStack.objects.create(task=old, asked_at=Now() - timedelta(seconds=KEPT_FOR + 60), **rows)
    RunningStack.objects.create(task=young, asked_at=Now() - timedelta(seconds=KEPT_FOR - 60), **rows)
    request_stack("default", mine.id)
    assert set(RunningStack.objects.values_list("task", flat=True)) == {young, mine.id}
    assert wait_for_stack("default", old, timeout=120) is None
