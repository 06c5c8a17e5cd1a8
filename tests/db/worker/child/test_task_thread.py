"""Timeouts: an attempt that takes too long fails with TaskTimeout, and its thread continues with the next task."""

from __future__ import annotations

from collections import Counter

import pytest

from django_pglock import enqueue_many, lock
from django_pglock.errors import TaskOptionError
from django_pglock.models import Attempt, Task
from django_pglock.worker.child import child
from tests.conftest import NEVER
from tests.db.worker.conftest import wait_for_end
from tests.sample import running_tasks as running
from tests.sample import session_tasks, tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

TIMEOUT = "django_pglock.errors.TaskTimeout"


@pytest.mark.parametrize("kind", ["sql", "check", "progress"])
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


@pytest.mark.parametrize("kind", running.LOOPS)
def test_no_loop_of_statements_swallows_its_timeout(worker, eventually, kind):
    process = worker(grace=NEVER)
    result = running.swallow.enqueue(kind)
    row = wait_for_end(result, eventually)
    attempt = Attempt.objects.get(task=row)
    assert (row.status, attempt.exception_path) == ("FAILED", TIMEOUT)
    assert "The attempt took longer than its timeout of 0.5 s." in attempt.traceback
    with lock("held by a task", timeout=0):
        pass
    # Its thread runs the next task, in a session without a trace of it.
    for _ in process.executor._threads:
        assert wait_for_end(tasks.connection_pid.enqueue(), eventually).status == "SUCCESSFUL"
    assert not process.is_stopping


def test_a_copy_ends_at_its_timeout(worker, eventually, monkeypatch):
    """The server does not tell a client that copies that the statement is cancelled, so the connection is closed."""
    monkeypatch.setattr("django_pglock.worker.child.runners.CANCEL_GRACE_PERIOD", 1.0)
    worker()
    row = wait_for_end(running.copy_in.enqueue(), eventually)
    assert (row.status, Attempt.objects.get().exception_path) == ("FAILED", TIMEOUT)
    assert not Effect.objects.exists()


def test_a_block_in_which_the_stop_is_swallowed_commits_nothing(worker, eventually):
    worker()
    row = wait_for_end(running.swallow_in_block.enqueue(), eventually)
    assert (row.status, Attempt.objects.get().exception_path) == ("FAILED", TIMEOUT)
    assert not Effect.objects.exists()


def test_a_cancel_stops_a_loop_of_statements_without_a_timeout(worker, eventually):
    worker()
    result = running.swallow_until_cancelled.enqueue()
    eventually(lambda: Effect.objects.exists())
    Task.objects.cancel()
    assert wait_for_end(result, eventually).status == "CANCELLED"
    assert Attempt.objects.get().exception_path == "django_pglock.errors.TaskCancelled"


def test_an_atomic_function_that_returns_too_late_is_rolled_back(worker, eventually):
    worker()
    row = wait_for_end(running.return_late.enqueue(), eventually)
    assert (row.status, Attempt.objects.get().exception_path) == ("FAILED", TIMEOUT)
    assert not Effect.objects.exists()


@pytest.mark.parametrize("function", [running.swallow_in_coroutine, running.leave_to_orm_thread])
def test_a_coroutine_that_swallows_its_stop_has_not_succeeded(worker, eventually, function):
    process = worker(grace=NEVER)
    row = wait_for_end(function.enqueue(), eventually)
    assert (row.status, Attempt.objects.get().exception_path) == ("FAILED", TIMEOUT)
    assert wait_for_end(running.count_in_coroutine.enqueue(closes=False), eventually).status == "SUCCESSFUL"
    assert not process.is_stopping


@pytest.mark.parametrize(
    ("function", "attempts"), [(running.retried_after_timeout, 2), (running.not_retried_after_timeout, 1)]
)
def test_the_retry_options_see_a_timeout_error(worker, eventually, function, attempts):
    worker()
    row = wait_for_end(function.enqueue(), eventually)
    assert (row.status, row.attempts) == ("FAILED", attempts)


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


def test_a_function_that_does_not_end_ends_its_worker_in_order(worker, eventually, caplog, gate, monkeypatch):
    """Its attempt ends as timed out. Other tasks get the grace period, and another process runs those that wait."""
    monkeypatch.setattr("django_pglock.worker.child.child.LEAST_GRACE_PERIOD", 0.3)
    process = worker(grace=0.0)
    neighbour = running.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.exists())
    first = process.child
    first.grace = NEVER
    result, waiting = running.block_in_c.enqueue(), tasks.echo.enqueue("waits")
    eventually(lambda: "does not end" in caplog.text)
    [said] = [text for text in caplog.messages if "does not end" in text]
    assert f"Task {result.id} (tests.sample.running_tasks.block_in_c)" in said
    stack = said.partition("Its code is at:\n")[2].splitlines()
    assert "running_tasks.py" in stack[0], "the frames of the worker are left out"
    assert stack[0].endswith("in block_in_c")
    assert stack[1] == "    gate.wait(FOREVER)"
    assert Task.objects.get(pk=result.id).status == "RUNNING", "it runs"
    eventually(lambda: process.child is not first)
    row = wait_for_end(waiting, eventually)
    assert (row.status, row.worker) == ("SUCCESSFUL", process.id)
    assert first.is_stopping
    running.note("go on")
    eventually(Task.objects.filter(pk=result.id, status="SCHEDULED", retries=1).exists)
    assert Attempt.objects.get().exception_path == TIMEOUT
    row = Task.objects.get(pk=neighbour.id)
    assert (row.status, row.worker, row.attempts) == ("SUCCESSFUL", first.id, 1)
    eventually(lambda: process.crew.all[0].id == process.id, why="the first one does not end")
    assert first.have_all_finished is False


def test_the_end_of_the_grace_is_a_timeout_for_functions_whose_time_is_over(worker, eventually, gate, caplog):
    """The others run again, without having lost an attempt."""
    process = worker(grace=0.5)
    late, busy = running.block_in_c.enqueue(), running.wait_for_note.enqueue("never")
    eventually(lambda: any(attempt.is_overdue for _, attempt in process.watchdog.running()) and Effect.objects.exists())
    assert process.shutdown() is False
    assert [*Task.objects.filter(pk=late.id).values_list("status", "retries")] == [("SCHEDULED", 1)]
    assert [*Task.objects.filter(pk=busy.id).values_list("status", "retries")] == [("SCHEDULED", 0)]
    assert "The default backoff is used" not in caplog.text, "that of the function may use the ORM"
    running.note("never")


def test_a_single_call_may_have_its_own_timeout(worker, eventually):
    worker()
    patient = running.sleep_in_c.using(timeout=300).enqueue(0.3)
    hasty = running.keep_busy.using(timeout=0.1).enqueue(0.3)
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


def test_a_child_whose_thread_waits_for_very_long_after_its_function_is_replaced(
    worker, eventually, somebody, monkeypatch
):
    """Here another session has locked the row of an atomic task. Its effects exist once, whatever the server does."""
    monkeypatch.setattr(child, "LONGEST_PHASE", 1)
    session_tasks.HAS_BEGUN.clear()
    session_tasks.GO_ON.clear()
    somebody.connection.set_autocommit(False)
    process = worker(grace=0.1)
    first = process.child
    result = session_tasks.write_and_pause.enqueue()
    assert session_tasks.HAS_BEGUN.wait(NEVER)
    somebody.ask("SELECT id FROM django_pglock_task FOR UPDATE")
    session_tasks.GO_ON.set()
    eventually(lambda: process.child is not first)
    assert f"Task {result.id} (tests.sample.session_tasks.write_and_pause)" in first.hung()
    assert "has waited for 1 s before or after its function" in first.hung()
    somebody.connection.rollback()
    row = wait_for_end(result, eventually)
    assert row.status == "SUCCESSFUL"
    assert Effect.objects.count() == 1
