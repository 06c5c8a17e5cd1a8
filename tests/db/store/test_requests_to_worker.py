"""Requests of users to a worker about its running tasks."""

from __future__ import annotations

from types import SimpleNamespace
from uuid import uuid4

import pytest

from django_pglock.models import Task
from django_pglock.store import requests_to_worker
from django_pglock.store.requests_to_worker import REQUESTS, answer_stack, request_stack, wait_for_stack
from django_pglock.store.statements import run
from django_pglock.store.wake import channel_of
from tests.conftest import NEVER
from tests.db.store.workers import beat_for
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def requests_to(*workers):
    """Return the requests to these workers: the claims to cancel, and those whose stacks are wanted."""
    rows = run("default", REQUESTS, list(workers))
    assert {worker for worker, *_ in rows} <= set(workers)
    return [(task, attempt) for _, task, attempt, is_cancel, _ in rows if is_cancel], [
        (task, attempt) for _, task, attempt, _, is_stack in rows if is_stack
    ]


def test_a_worker_gets_the_requests_about_the_tasks_that_it_runs(mine, claim):
    tasks.nothing.enqueue()
    [other] = claim()
    assert requests_to(mine.worker) == ([], [])
    Task.objects.filter(pk=mine.id).cancel()
    assert requests_to(mine.worker) == ([(mine.id, mine.attempt)], [])
    request_stack("default", other.id)
    assert requests_to(mine.worker) == ([(mine.id, mine.attempt)], [])
    assert requests_to(other.worker) == ([], [(other.id, other.attempt)])
    assert requests_to(mine.worker, other.worker) == ([(mine.id, mine.attempt)], [(other.id, other.attempt)])
    answer_stack("default", other.id, other.attempt, other.worker, "here")
    assert requests_to(other.worker) == ([], [])
    assert requests_to(uuid4()) == ([], [])


def test_only_the_parent_of_the_worker_of_a_running_task_is_asked(mine, session):
    waiting, parent, other = tasks.nothing.enqueue(), uuid4(), uuid4()
    beat_for(parent, mine.worker, uuid4())
    beat_for(other, uuid4())
    assert request_stack("default", waiting.id) is False
    assert request_stack("default", 10**12) is False
    session.ensure_connection()
    for each in (parent, other):
        session.connection.execute(f"LISTEN {channel_of(each)}")
    assert request_stack("default", mine.id) is True
    Task.objects.filter(pk=mine.id).cancel()
    notes = list(session.connection.notifies(timeout=NEVER, stop_after=2))
    assert [(note.channel, note.payload) for note in notes] == [(channel_of(parent), str(mine.worker))] * 2
    assert requests_to(mine.worker) == ([(mine.id, mine.attempt)], [(mine.id, mine.attempt)])


def test_an_answer_counts_once_and_only_from_the_attempt_that_was_asked(mine, monkeypatch):
    request_stack("default", mine.id)
    answer_stack("default", mine.id, mine.attempt + 1, mine.worker, "of another attempt")
    answer_stack("default", mine.id, mine.attempt, uuid4(), "of another worker")
    slept = []
    time = SimpleNamespace(monotonic=iter((0.0, 0.5, 1.0)).__next__, sleep=slept.append)
    with monkeypatch.context() as patch:
        patch.setattr(requests_to_worker, "time", time)
        assert wait_for_stack("default", mine.id, timeout=1).answered_at is None
    assert slept == [requests_to_worker.CHECK_INTERVAL]
    answer_stack("default", mine.id, mine.attempt, mine.worker, "here")
    answer_stack("default", mine.id, mine.attempt, mine.worker, "too late")
    assert wait_for_stack("default", mine.id, timeout=120).text == "here"
    assert requests_to(mine.worker)[1] == []


def test_a_later_attempt_does_not_answer_and_a_new_request_replaces_the_previous_one(mine):
    request_stack("default", mine.id)
    Task.objects.update(attempts=mine.attempt + 1)
    assert requests_to(mine.worker) == ([], [])
    answer_stack("default", mine.id, mine.attempt + 1, mine.worker, "of the later attempt")
    assert wait_for_stack("default", mine.id, timeout=0).text is None
    request_stack("default", mine.id)
    assert wait_for_stack("default", mine.id, timeout=0)[0] == mine.attempt + 1
    assert requests_to(mine.worker)[1] == [(mine.id, mine.attempt + 1)]


def test_a_worker_does_not_wait_for_a_locked_row_to_answer(mine, locked):
    request_stack("default", mine.id)
    with locked(mine.id):
        answer_stack("default", mine.id, mine.attempt, mine.worker, "here")
    assert requests_to(mine.worker)[1] == [(mine.id, mine.attempt)], "it is asked again"
