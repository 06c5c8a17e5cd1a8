"""The event loop: coroutine tasks run side by side, beside the threads."""

from __future__ import annotations

import pytest

from django_pglock.errors import TaskTimeout
from django_pglock.models import Task
from django_pglock.worker.child.in_flight import MOST_ASYNC
from tests.sample import running_tasks, session_tasks, tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_async_functions_run_side_by_side(worker, finished):
    """More coroutines run at once than there are threads."""
    results = [tasks.sleep_async.enqueue(2.0) for _ in range(10)]
    worker(threads=2)
    for result in results:
        assert finished(result).return_value == 2.0
    at_once = [sum(other.started_at <= one.started_at < other.finished_at for other in results) for one in results]
    assert max(at_once) > 2


def test_slow_coroutines_keep_no_thread_idle_and_a_long_function_no_coroutine_waiting(worker, finished, eventually):
    """The greatest number of coroutines waits forever, and more coroutines are ready before the other tasks."""
    running = worker(threads=1)
    waiting = [tasks.sleep_async.enqueue(600) for _ in range(MOST_ASYNC + 20)]
    eventually(lambda: running.in_flight.coroutines.running == MOST_ASYNC)
    assert finished(tasks.echo.enqueue("beside")).return_value == "beside"
    Task.objects.filter(pk__in=[result.id for result in waiting]).cancel()
    eventually(lambda: running.in_flight.coroutines.running == 0)
    running_tasks.wait_for_note.enqueue("the end")
    eventually(lambda: running.in_flight.threads.running == 1)
    assert finished(tasks.sleep_async.enqueue(0)).return_value == 0
    running_tasks.note("the end")


@pytest.mark.parametrize(("task", "status"), [(tasks.leave_in_child, "FAILED"), (tasks.stop_its_loop, "SUCCESSFUL")])
def test_no_coroutine_ends_the_loop_of_the_others(worker, finished, eventually, task, status):
    """asyncio ends the loop when SystemExit leaves a coroutine that another one has started."""
    running = worker(threads=1)
    session_tasks.GO_ON.clear()
    beside = session_tasks.wait_until_told.enqueue()
    eventually(lambda: running.in_flight.coroutines.running == 1)
    assert finished(task.enqueue()).status == status
    assert finished(tasks.sleep_async.enqueue(0)).return_value == 0
    session_tasks.GO_ON.set()
    assert finished(beside).return_value == "told"
    eventually(lambda: running.in_flight.coroutines.running == 0)
    assert running.hung() is None
    assert running.shutdown() is True


def test_a_coroutine_that_is_cancelled_before_its_first_step_is_given_back(worker, finished, eventually):
    """Before, such a task stayed RUNNING as long as its worker lived: no line of the worker's coroutine had run."""
    running = worker(threads=1)
    tasks.cancel_new_coroutines.enqueue(3)
    eventually(lambda: running.in_flight.coroutines.running == 1)
    for result in [tasks.sleep_async.enqueue(0) for _ in range(2)]:
        assert finished(result).status == "SUCCESSFUL"
        assert (result.attempts, result.errors) == (1, [])
    # asyncio counts this one as cancelled, although it has returned.
    assert finished(tasks.cancel_itself_at_its_end.enqueue()).return_value == "the end"
    eventually(lambda: (running.in_flight.coroutines.running, running.in_flight.claims) == (0, {}))


def test_a_coroutine_is_stopped_also_if_another_has_shut_down_the_executor_of_the_loop(worker, finished):
    worker(threads=1)
    assert finished(tasks.shut_down_executor_of_loop.enqueue()).status == "SUCCESSFUL"
    late = finished(tasks.sleep_async.using(timeout=0.1).enqueue(600))
    assert [error.exception_class for error in late.errors] == [TaskTimeout]
