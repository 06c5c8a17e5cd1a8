"""Timeouts: an attempt that takes too long fails with TaskTimeout, and its thread continues with the next task."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from django_pglock import enqueue_many
from django_pglock.errors import TaskOptionError
from django_pglock.models import Attempt, Task
from django_pglock.tasks.compat import TaskResultStatus
from tests.conftest import NEVER
from tests.db.worker.conftest import wait_for_end
from tests.sample import running_tasks as running
from tests.sample import tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

TIMEOUT = "django_pglock.errors.TaskTimeout"


@pytest.mark.parametrize("kind", ["sql", "python"])
def test_an_attempt_that_takes_too_long_fails_and_is_tried_again(worker, eventually, kind):
    worker()
    result = running.too_long_once.enqueue(kind)
    row = wait_for_end(result, eventually)
    assert (row.status, row.result, row.attempts) == ("SUCCESSFUL", "second", 2)
    attempt = Attempt.objects.get()
    assert (attempt.outcome, attempt.exception_path) == ("FAILED", TIMEOUT)
    assert "The attempt took longer than its timeout of " in attempt.traceback
    result.refresh()
    assert issubclass(result.errors[0].exception_class, TimeoutError)


def test_the_timeout_of_an_atomic_task_rolls_back(worker, eventually):
    worker()
    row = wait_for_end(running.write_too_long.enqueue(), eventually)
    assert row.status == "FAILED"
    assert not Effect.objects.exists()


@pytest.mark.parametrize(("kind", "status"), [("sql", "FAILED"), ("python", "SUCCESSFUL")])
def test_a_function_that_catches_the_database_error_gets_the_timeout_next(
    worker, eventually, kind, status, monkeypatch
):
    """The exception is raised once: a function that catches it may continue."""
    monkeypatch.setattr("django_pglock.worker.running.task_thread.BETWEEN_STOPS", 0.2)
    worker()
    row = wait_for_end(running.swallow_once.enqueue(kind, running.FOREVER if kind == "sql" else 1), eventually)
    assert row.status == status
    assert [each.exception_path for each in Attempt.objects.all()] == ([TIMEOUT] if kind == "sql" else [])


def test_a_function_that_blocks_in_c_times_out_when_it_returns(worker, eventually):
    worker()
    row = wait_for_end(running.sleep_in_c.enqueue(0.6), eventually)
    attempt = Attempt.objects.get()
    assert (row.status, attempt.exception_path) == ("FAILED", TIMEOUT)
    assert (attempt.finished_at - attempt.started_at).total_seconds() >= 0.6


@pytest.fixture
def gate():
    running.gate.clear()
    yield running.gate
    running.gate.set()


def test_a_function_that_does_not_end_keeps_its_claim_and_is_logged(worker, eventually, caplog, gate):
    """No other worker may run the task while this thread runs it."""
    process = worker(grace=0.1)
    result = running.block_in_c.enqueue()
    eventually(lambda: "thread is lost" in caplog.text)
    assert "--processes" in caplog.text
    [said] = [text for text in caplog.messages if "thread is lost" in text]
    stack = said.partition("Its code is at:\n")[2].splitlines()
    assert "running_tasks.py" in stack[0], "the frames of the worker are left out"
    assert stack[0].endswith("in block_in_c")
    assert stack[1] == "    gate.wait(FOREVER)"
    assert tasks.echo.enqueue("the other thread").wait(60)
    assert Task.objects.get(pk=result.id).status == "RUNNING"
    gate.set()
    eventually(lambda: Task.objects.get(pk=result.id).status == "SCHEDULED")
    assert caplog.text.count("thread is lost") == 1
    assert process.executor.long_overdue() == []


def test_a_worker_does_not_wait_for_a_function_that_does_not_end(worker, eventually, gate, monkeypatch):
    """The attempt ends as timed out, not as given back. Other tasks get the grace period."""
    monkeypatch.setattr("django_pglock.worker.worker.LEAST_GRACE_PERIOD", 0.3)
    process = worker(grace=0.0)
    result = running.block_in_c.enqueue()
    eventually(lambda: process.executor.long_overdue())
    process.grace = running.FOREVER / 2
    neighbour = tasks.note_and_sleep.enqueue("neighbour", 0.5)
    eventually(lambda: Effect.objects.filter(name="neighbour").exists())
    began = time.monotonic()
    assert process.shutdown() is False
    assert time.monotonic() - began < NEVER
    assert Task.objects.get(pk=neighbour.id).status == "SUCCESSFUL"
    row = Task.objects.get(pk=result.id)
    assert (row.status, row.retries) == ("SCHEDULED", 1)
    assert Attempt.objects.get().exception_path == TIMEOUT


def test_a_single_call_may_have_its_own_timeout(worker, eventually):
    worker()
    patient = running.sleep_in_c.using(timeout=300).enqueue(0.3)
    hasty = running.keep_busy.using(timeout=0.1).enqueue(running.FOREVER)
    assert wait_for_end(patient, eventually).result == "asleep"
    assert wait_for_end(hasty, eventually).status == "FAILED"
    assert Attempt.objects.get().exception_path == TIMEOUT
    for impossible in (-1, 0):
        with pytest.raises(TaskOptionError):
            running.keep_busy.using(timeout=impossible)


def test_tasks_that_end_at_their_timeout_get_one_outcome_each(worker, eventually):
    """Each task has one outcome, the threads live, and later tasks in them get no timeout."""
    process = worker(threads=4)
    count = 120
    results = enqueue_many(running.end_at_deadline, range(count))
    others = enqueue_many(tasks.record, [("unharmed", number) for number in range(count)])
    eventually(lambda: not Task.objects.filter(finished_at__isnull=True).exists())
    assert all(thread.is_alive() for thread in process.executor._threads)
    ended = Counter(Task.objects.filter(pk__in=results).values_list("status", flat=True))
    assert sum(ended.values()) == count
    assert set(ended) <= {"SUCCESSFUL", "FAILED"}
    assert Attempt.objects.count() == ended["FAILED"]
    assert set(Attempt.objects.values_list("exception_path", flat=True)) <= {TIMEOUT}
    assert Task.objects.filter(pk__in=others, status="SUCCESSFUL").count() == count
    assert Counter(Effect.objects.values_list("number", flat=True)) == Counter(range(count))


def test_a_timeout_replaces_the_sessions_of_the_thread(worker, eventually):
    """The thread may have been interrupted in the middle of a statement."""
    worker(threads=1)
    before = wait_for_end(tasks.connection_pid.enqueue(), eventually).result
    assert wait_for_end(tasks.connection_pid.enqueue(), eventually).result == before
    wait_for_end(running.keep_busy.using(timeout=0.1).enqueue(running.FOREVER), eventually)
    assert wait_for_end(tasks.connection_pid.enqueue(), eventually).result != before


def test_a_task_that_ends_before_its_timeout_succeeds(worker, eventually):
    process = worker()
    result = running.keep_busy.using(timeout=300).enqueue(0.01)
    assert wait_for_end(result, eventually).status == "SUCCESSFUL"
    eventually(lambda: all(thread.attempt is None for thread in process.executor.watchdog.task_threads))
    result.refresh()
    assert result.status == TaskResultStatus.SUCCESSFUL
