"""Timeouts in real processes: functions that swallow their stop, that do not leave, and logs that hang."""

from __future__ import annotations

import os
import signal

import pytest

from django_pglock.models import Attempt, Task, Worker
from tests.sample import running_tasks as running
from tests.sample import tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]

#: Longer than a worker may be silent, and a round of rescue: another one would have run the tasks again.
LONG = 7.0
TIMEOUT = "django_pglock.errors.TaskTimeout"


def ended(results) -> bool:
    return not Task.objects.filter(pk__in=[each.id for each in results], finished_at=None).exists()


def failed_by_timeout(results) -> bool:
    found = Attempt.objects.filter(task__in=[each.id for each in results]).values_list("exception_path", flat=True)
    rows = Task.objects.filter(pk__in=[each.id for each in results])
    return [*found] == [TIMEOUT] * len(results) and {row.status for row in rows} == {"FAILED"}


def test_timeouts_in_the_middle_of_logging_leave_the_log_usable(worker_process, eventually):
    """Before, an exception was sent into the thread. Between two lines of ``logging``, its lock stayed locked forever,
    and everything in the process waited for it, under a fresh heartbeat."""
    process = worker_process("--threads", "3")
    results = [running.log_for.enqueue(0.6) for _ in range(15)]
    eventually(lambda: ended(results), why=process.output)
    assert failed_by_timeout(results)
    assert tasks.echo.enqueue("alive").wait(60).status == "SUCCESSFUL"
    process.send(signal.SIGTERM)
    assert process.wait() == 0


def test_a_function_in_c_that_keeps_the_gil_fails_by_its_timeout(worker_process, eventually):
    process = worker_process("--threads", "2", "--grace", "600")
    result = running.keep_gil.using(timeout=0.3).enqueue(1.5)
    eventually(lambda: ended([result]), why=process.output)
    assert failed_by_timeout([result])
    assert tasks.echo.enqueue("alive").wait(60).status == "SUCCESSFUL"


def test_a_child_is_replaced_for_a_coroutine_that_does_not_leave(worker_process, eventually):
    """A task beside it finishes, those that wait run in the next child, and the worker continues."""
    process = worker_process("--threads", "3", "--grace", "5")
    neighbour = running.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.filter(name="waits").exists())
    result = running.overrun_in_coroutine.enqueue()
    process.wait_for("The process is replaced.")
    assert tasks.echo.enqueue("runs in the next child").wait(60).status == "SUCCESSFUL"
    Effect.objects.create(name="go on")

    eventually(lambda: ended([neighbour, result]), why=process.output)
    assert failed_by_timeout([result])
    assert list(Task.objects.filter(pk=neighbour.id).values_list("status", "attempts")) == [("SUCCESSFUL", 1)]
    assert f"Task {result.id} ({result.task.module_path}) attempt 1 of 1 does not end" in process.output
    assert "Let the function call context.check()" in process.output
    eventually(lambda: Worker.objects.count() == 1, why=process.output)
    process.send(signal.SIGTERM)
    assert process.wait() == 0


def test_a_child_whose_services_hang_in_the_log_is_replaced(worker_process, eventually):
    """The parent kills it, because its main thread may hang there, too."""
    process = worker_process("--threads", "2", "--grace", "0")
    running.block_log.enqueue()
    process.wait_for("has not responded")
    assert tasks.echo.enqueue("alive").wait(60).status == "SUCCESSFUL"


@pytest.mark.parametrize("log", ["block", "raise"])
def test_a_parent_whose_log_does_not_work_beats_for_its_children(worker_process, eventually, log):
    """A handler of the project waits for a network that does not answer, or raises an error."""
    process = worker_process("--threads", "2", DJANGO_SETTINGS_MODULE="tests.settings_broken_log", BROKEN_LOG=log)
    worker_process("--threads", "1")
    tasks.note_and_sleep.enqueue("once", LONG)
    child = eventually(lambda: Effect.objects.first()).pid
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").exists(), why=process.output)
    assert list(Task.objects.values_list("attempts", "rescues")) == [(1, 0)]
    os.kill(child, signal.SIGKILL)
    eventually(lambda: not Worker.objects.filter(pid=child).exists(), why=process.output)
    eventually(lambda: Worker.objects.count() == 2, why="the child is not replaced")
    process.send(signal.SIGTERM)
    eventually(lambda: Worker.objects.count() == 1, why="its child does not end")
    assert process.wait() == 0, "it does not wait for the log without end"
