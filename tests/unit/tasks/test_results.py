"""Results made from values: their states, their errors, and how long a wait takes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from django_pglock.tasks import results
from django_pglock.tasks.compat import TaskResultStatus
from django_pglock.tasks.results import PostgresTaskResult, as_called, error_of, make_result
from django_pglock.tasks.states import TaskStatus
from tests.sample import tasks


def result_of(**values):
    known = {"id": 7, "status": "READY", "args": [1], "kwargs": {}, "backend": "default", "enqueued_at": None}
    return make_result(tasks.echo, **{**known, **values})


def test_each_status_of_ours_is_one_of_djangos():
    public = {status: result_of(status=status.value).status for status in TaskStatus}
    waiting = {TaskStatus.SCHEDULED, TaskStatus.BLOCKED, TaskStatus.READY}
    assert {status for status in public if public[status] == TaskResultStatus.READY} == waiting
    assert public[TaskStatus.RUNNING] == TaskResultStatus.RUNNING
    assert public[TaskStatus.SUCCESSFUL] == TaskResultStatus.SUCCESSFUL
    assert public[TaskStatus.FAILED] == public[TaskStatus.CANCELLED] == TaskResultStatus.FAILED


def test_a_result_has_its_values_and_shows_no_arguments():
    result = result_of(
        status="SUCCESSFUL", args=["secret"], worker_ids=("a", "b"), errors=iter([error()]), return_value=0
    )
    assert isinstance(result, PostgresTaskResult)
    assert (result.id, result.return_value, result.worker_ids, len(result.errors)) == ("7", 0, ["a", "b"], 1)
    assert repr(result) == "<TaskResult 7 of tests.sample.tasks.echo SUCCESSFUL>"
    assert result_of(status="SUCCESSFUL").return_value is None


def error(path="builtins.ValueError"):
    return error_of(SimpleNamespace(exception_path=path, traceback="ValueError: no"))


def test_the_class_of_an_error_is_not_imported():
    assert (error().exception_class, error().traceback) == (ValueError, "ValueError: no")
    for path in ("shop.nowhere.Error", "builtins.NoSuchError", "ValueError"):
        with pytest.raises(ImportError, match=f"{path!r} is not imported, and reading a result imports nothing"):
            _ = error(path).exception_class
    for path in ("builtins.print", "builtins.int"):
        with pytest.raises(ValueError, match=f"{path!r} is not an exception class"):
            _ = error(path).exception_class


def test_a_result_is_of_the_call_with_its_options():
    assert as_called(tasks.echo, priority=0, queue_name="default") is tasks.echo
    called = as_called(tasks.echo, priority=5, queue_name="default")
    assert (called.priority, called.func) == (5, tasks.echo.func)
    assert as_called(tasks.echo, priority=5000) is tasks.echo, "the settings or Django no longer allow it"


@pytest.mark.parametrize("why", ["", "no worker serves its queue"])
def test_a_wait_for_a_result_passes_its_remaining_time_and_fails_with_the_reason(monkeypatch, why):
    asked, moments = [], iter([100.0, 103.0])
    monkeypatch.setattr(results, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    backend = SimpleNamespace(await_end=lambda *given: asked.append(given), why_unfinished=lambda id_: why)
    monkeypatch.setattr(PostgresTaskResult, "_backend", backend)
    with pytest.raises(TimeoutError) as timed_out:
        result_of().wait(10)
    assert str(timed_out.value) == f"Task 7 has not finished within 10 s{': ' if why else ''}{why}."
    assert asked == [(7, 7.0)]


async def in_coroutine(result, *args):
    return await result.await_(*args)


#: The two kinds of wait.
WAITS = [PostgresTaskResult.wait, lambda *args: asyncio.run(in_coroutine(*args))]
either_wait = pytest.mark.parametrize("wait", WAITS, ids=["wait", "await_"])


@pytest.fixture
def wait_with(monkeypatch):
    """Give all results a backend with these answers to a wait, and these statuses at each refresh."""

    def prepare(answers, statuses=()):
        answers, statuses = iter(answers), iter(statuses)

        def await_end(id_, timeout):
            return next(answers)

        def refresh(result):
            object.__setattr__(result, "status", next(statuses))

        async def await_end_async(id_, timeout):
            return next(answers)

        async def arefresh(result):
            refresh(result)

        backend = SimpleNamespace(
            await_end=await_end, await_end_async=await_end_async, why_unfinished="{} waits".format
        )
        monkeypatch.setattr(PostgresTaskResult, "_backend", backend)
        monkeypatch.setattr(PostgresTaskResult, "refresh", refresh)
        monkeypatch.setattr(PostgresTaskResult, "arefresh", arefresh)

    return prepare


@either_wait
def test_a_wait_ends_with_its_timeout_and_the_reason(wait, wait_with):
    wait_with([None])
    with pytest.raises(TimeoutError, match=r"^Task 7 has not finished within 5 s: 7 waits\.$"):
        wait(result_of(), 5)


def test_a_wait_is_never_shorter_than_nothing(monkeypatch):
    moments = iter([100.0, 111.0])
    monkeypatch.setattr(results, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    assert next(results._seconds_left(10)) == 0
