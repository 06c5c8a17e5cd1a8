"""One attempt: the call of the function, and the outcome that follows from its end."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest

from django_pglock.models import Task
from django_pglock.tasks.compat import BaseTaskBackend, TaskResultStatus
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_the_return_value_of_a_function_is_in_its_result(worker, finished):
    worker()
    for value in (None, 0, "text", [1, {"a": None}], {"ä": 1.5}, [-1.5, "1e+23"]):
        result = finished(tasks.echo.enqueue(value))
        assert result.return_value == value
        assert (result.attempts, result.errors) == (1, [])
        assert result.enqueued_at <= result.started_at <= result.finished_at
        assert result.last_attempted_at == result.started_at


def test_the_context_knows_attempt_and_result(worker, finished):
    worker()
    result = tasks.tell_context.enqueue("hello")
    assert finished(result).return_value == [1, result.id, "hello"]


def test_a_failure_is_recorded_with_its_traceback(worker, finished):
    worker()
    result = finished(tasks.fail.enqueue("boom"))
    assert result.status == TaskResultStatus.FAILED
    [error] = result.errors
    assert error.exception_class is ValueError
    assert "ValueError: boom" in error.traceback


def test_retries_end_with_success_or_with_the_last_attempt(worker, finished):
    worker()
    result = finished(tasks.fail_twice.enqueue("a"))
    assert (result.return_value, result.attempts, len(result.errors)) == ("at last", 3, 2)
    assert finished(tasks.fail_with_function.enqueue()).attempts == 2
    assert finished(tasks.fail_with_broken_function.using(max_attempts=1).enqueue()).attempts == 1
    assert finished(tasks.fail_with_function_that_exits.enqueue()).attempts == 2


def test_exceptions_that_are_not_to_be_retried_are_not(worker, finished):
    worker()
    assert finished(tasks.fail_for_good.enqueue()).attempts == 1


def test_a_retry_waits_its_back_off(worker, eventually):
    worker()
    tasks.fail_with_long_wait.enqueue()
    row = eventually(lambda: Task.objects.filter(status="SCHEDULED").first())
    assert timedelta(minutes=59) < row.run_after - row.enqueued_at < timedelta(minutes=61)


def test_unusual_exceptions_are_stored_as_failures(worker, finished, caplog):
    """Other queues crash on a NUL in a message and leave the task running forever."""
    # Django's own log has the exception as it is, and pytest cannot send each character from process to process.
    caplog.set_level(logging.CRITICAL, logger=BaseTaskBackend.__module__.partition(".backends")[0])
    worker(threads=1)
    for task, path in (
        (tasks.raise_nul, "builtins.ValueError"),
        (tasks.raise_unprintable, "tests.sample.tasks.raise_unprintable.<locals>.Unprintable"),
        (tasks.return_unstorable, "django_pglock.errors.TaskResultError"),
        (tasks.leave, "builtins.SystemExit"),
        (tasks.cancel_itself, "asyncio.exceptions.CancelledError"),
        (tasks.break_connection, "django.db.utils.DataError"),
        (tasks.raise_nonsense, "builtins.TypeError"),
        (tasks.raise_answer, "builtins.RuntimeError"),
        (tasks.raise_answer_atomically, "tests.sample.tasks.Answer"),
        (tasks.raise_answer_in_coroutine, "tests.sample.tasks.Answer"),
        (tasks.raise_closed, "builtins.TypeError"),
        (tasks.raise_closed_atomically, "builtins.TypeError"),
        (tasks.raise_after_closed_in_coroutine, "builtins.TypeError"),
        (tasks.raise_ring, "builtins.KeyError"),
        (tasks.raise_ring_in_coroutine, "builtins.KeyError"),
    ):
        result = finished(task.enqueue())
        assert [error.exception_class_path for error in result.errors] == [path], task.name
        assert finished(tasks.echo.enqueue("still here")).return_value == "still here", task.name


def test_a_function_that_is_called_wrongly_fails_by_itself(worker, finished):
    """enqueue() refuses such a call, but another program or an older version may have written the row."""
    result = tasks.echo.enqueue("one")
    Task.objects.update(args=["one", "too many"])
    worker()
    assert finished(result).errors[0].exception_class is TypeError


def test_invalid_arguments_in_the_table_fail_only_their_task(worker, eventually):
    worker(threads=1)
    row = Task.objects.create(
        queue="default", backend="default", task_path="tests.sample.tasks.echo", args={"not": "a list"}
    )
    eventually(lambda: Task.objects.filter(pk=row.pk, status="FAILED").exists())
