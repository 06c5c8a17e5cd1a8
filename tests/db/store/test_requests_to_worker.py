"""Requests of users to a worker about its running tasks."""

from __future__ import annotations

from types import SimpleNamespace
from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_pglock import enqueue_many
from django_pglock.models import Task
from django_pglock.store import requests_to_worker
from django_pglock.store.outcome import Succeeded
from django_pglock.store.requests_to_worker import (
    REQUESTS,
    answer_stack,
    request_stack,
    wait_for_stack,
    write_logs,
    write_progress,
)
from django_pglock.store.settle import settle
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


# The progress of running tasks is written in few statements.


@pytest.mark.parametrize("is_last", [False, True])
def test_progress_is_written_into_the_row_of_its_own_task_only(claim, is_last):
    enqueue_many(tasks.nothing, [{}] * 2)
    mine, other = claim(2)
    mine.progress = '{"done": 1}'
    write_progress("default", [mine], is_last=is_last)
    assert Task.objects.get(pk=mine.id).progress == {"done": 1}
    assert Task.objects.get(pk=other.id).progress is None


def test_progress_of_a_lost_claim_changes_nothing(claim):
    tasks.nothing.enqueue()
    [mine] = claim()
    mine.progress = '{"done": 1}'
    Task.objects.update(attempts=2)
    for is_last in (False, True):
        write_progress("default", [mine], is_last=is_last)
    assert Task.objects.get().progress is None
    assert mine.written_progress is None


def test_progress_of_a_finished_task_changes_nothing(claim):
    tasks.nothing.enqueue()
    [mine] = claim()
    settle("default", [(mine, Succeeded())], mine.worker)
    mine.progress = '{"done": 1}'
    write_progress("default", [mine])
    assert Task.objects.get().progress is None


def test_a_locked_row_does_not_hold_up_the_heartbeat(claim, in_threads):
    from django.db import transaction

    tasks.nothing.enqueue()
    [mine] = claim()
    mine.progress = '{"done": 1}'
    with transaction.atomic():
        Task.objects.select_for_update().get(pk=mine.id)
        in_threads(lambda _: write_progress("default", [mine]), 1)
    assert mine.written_progress is None, "so it is tried again"
    write_progress("default", [mine])
    assert Task.objects.get().progress == {"done": 1}
    assert mine.written_progress is mine.progress


def hot_updates():
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
        cursor.execute("SELECT pg_stat_get_tuples_hot_updated('django_pglock_task'::regclass)")
        return cursor.fetchone()[0]


def test_progress_is_written_beside_the_old_version_of_the_row(claim):
    """The update is HOT: it writes no index entry, and later reads of the page prune the old version."""
    tasks.nothing.enqueue()
    [mine] = claim()
    for number in range(3):
        mine.progress = f'{{"done": {number}}}'
        write_progress("default", [mine], is_last=number == 2)
    before = hot_updates()
    mine.progress = '{"done": 9}'
    with CaptureQueriesContext(connection) as queries:
        write_progress("default", [mine])
    assert len(queries) == 1
    assert hot_updates() == before + 1


def test_each_log_is_written_into_the_row_of_its_claim_unless_this_was_lost(claim):
    enqueue_many(tasks.nothing, [{}] * 3)
    first, second, lost = claim(3)
    first.log, second.log, lost.log = "a", "", "c"
    Task.objects.filter(pk=second.id).update(log="of the attempt before")
    Task.objects.filter(pk=lost.id).update(attempts=2, log="of the attempt after")
    write_logs("default", [first, second, lost])
    assert list(Task.objects.order_by("id").values_list("log", flat=True)) == ["a", None, "of the attempt after"]


def test_the_log_of_one_claim_is_written_and_a_locked_row_is_skipped(claim, locked):
    """Another outcome of the same task may be written at this moment."""
    tasks.nothing.enqueue()
    [mine] = claim()
    mine.log = "a"
    with locked(mine.id):
        write_logs("default", [mine])
    assert Task.objects.get().log is None
    write_logs("default", [mine])
    assert Task.objects.get().log == "a"
