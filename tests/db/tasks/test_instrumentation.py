"""Instruments: which calls they get for enqueues and attempts, and that their errors harm neither."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from django_pglock import DuplicateTask, Unique, enqueue_many
from django_pglock.errors import TaskOptionError
from django_pglock.models import Task
from django_pglock.store.outcome import Failed, Retried, Succeeded
from django_pglock.tasks import instrumentation
from django_pglock.tasks.instrumentation import UNOBSERVED, headers_of
from django_pglock.tasks.redaction import REDACTED, shown
from django_pglock.worker.child.run import prepare, run, run_async
from django_pglock.worker.child.runners import Runner, Watchdog
from tests.sample import keyed_tasks, tasks

pytestmark = pytest.mark.django_db(transaction=True)


class Recorder:
    """An instrument that records its calls."""

    def __init__(self, name: str = "recorder") -> None:
        self.name = name
        self.told: list[Any] = []

    def enqueuing(self, task: Any) -> Any:
        ids, error = yield {"from": task.module_path}
        self.told.append((list(ids), type(error)))

    def running(self, attempt: Any) -> Any:
        self.told.append([headers_of(claim.meta, self.name).get("from") for claim in attempt.claims])
        outcome = yield
        if isinstance(outcome, Failed):
            self.told.append(variables_of(outcome.failure.exception))
        self.told.append(type(outcome))


class Broken:
    """An instrument that raises, at the begin or at the end."""

    name = "broken"

    def __init__(self, *, early: bool) -> None:
        self.early = early

    def enqueuing(self, task: Any) -> Any:
        if self.early:
            raise ZeroDivisionError
        yield {}
        raise LookupError

    running = enqueuing


def variables_of(error: BaseException) -> dict[str, Any]:
    """Return the variables of the frame that has raised."""
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    return dict(trace.tb_frame.f_locals)


@pytest.fixture
def recorder():
    found = Recorder()
    instrumentation.add(found)
    yield found
    instrumentation.remove(found.name)


@pytest.fixture
def execute(claim):
    def take_and_run() -> Any:
        return run(prepare(claim()[0], "default"), Runner(Watchdog()))

    return take_and_run


@pytest.mark.parametrize("task", [tasks.nothing, tasks.record_atomically.using(queue_name="default")])
def test_an_instrument_is_called_at_the_enqueue_and_at_the_run(task, recorder, execute):
    result = task.enqueue("x")
    assert recorder.told.pop() == ([result.id], type(None))
    execute()
    assert recorder.told == [[task.module_path], Succeeded]


def test_an_async_function_is_observed(recorder, claim):
    tasks.sleep_async.enqueue(0)
    attempt = prepare(claim()[0], "default")
    asyncio.run(run_async(attempt, Runner(Watchdog())))
    assert recorder.told[1:] == [[tasks.sleep_async.module_path], Succeeded]


def test_an_instrument_gets_the_exception_with_the_variables_of_its_frames(recorder, execute):
    tasks.fail.enqueue("gone")
    error = execute().outcome.failure.exception
    assert recorder.told[1:] == [[tasks.fail.module_path], {"text": "gone"}, Failed]
    assert variables_of(error) == {}


def test_each_attempt_has_the_headers_of_the_call(recorder, worker, eventually):
    worker()
    tasks.fail_for_good.using(max_attempts=1).enqueue()
    tasks.fail_twice.enqueue("x")
    eventually(lambda: Task.objects.filter(finished_at__isnull=False).count() == 2)
    assert recorder.told.count([tasks.fail_twice.module_path]) == 3
    assert recorder.told.count(Retried) == 2


def test_an_instrument_is_called_once_for_enqueue_many(recorder):
    ids = enqueue_many(tasks.nothing, [(1,), (2,), (3,)])
    assert recorder.told == [(ids, type(None))]
    for meta in Task.objects.values_list("meta", flat=True):
        assert meta == {"headers": {"recorder": {"from": tasks.nothing.module_path}}}


def test_an_instrument_is_called_once_for_the_run_of_a_group(recorder, worker, eventually):
    enqueue_many(keyed_tasks.digest, [{"user": 1, "text": number} for number in range(3)])
    worker()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 3)
    assert recorder.told[1:] == [[keyed_tasks.digest.module_path] * 3, Succeeded]


def test_an_instrument_gets_the_error_of_a_refused_enqueue(recorder):
    once = tasks.nothing.using(unique=Unique(on_conflict="raise"))
    once.enqueue()
    with pytest.raises(DuplicateTask):
        once.enqueue()
    assert recorder.told[1:] == [([], DuplicateTask)]


@pytest.mark.parametrize("early", [True, False])
def test_an_instrument_that_raises_has_no_effect_on_tasks(early, recorder, execute, caplog):
    instrumentation.add(Broken(early=early))
    try:
        tasks.fail.enqueue("gone")
        assert isinstance(execute().outcome, Failed)
    finally:
        instrumentation.remove("broken")
    # The other instruments are called as usual.
    assert [each for each in recorder.told if each is Failed]
    assert {each.exc_info[0] for each in caplog.records} == {ZeroDivisionError if early else LookupError}


def test_without_instruments_nothing_is_stored(claim):
    tasks.nothing.enqueue()
    [claimed] = claim()
    assert claimed.meta == "{}"
    attempt = prepare(claimed, "default")
    attempt.observe()
    assert attempt.observed is UNOBSERVED


def test_an_instrument_replaces_one_of_the_same_name(recorder):
    other = Recorder(recorder.name)
    instrumentation.add(other)
    assert instrumentation.instruments == (other,)
    tasks.nothing.enqueue()
    assert (len(recorder.told), len(other.told)) == (0, 1)


def test_an_instrument_without_headers_stores_nothing(recorder, claim):
    recorder.enqueuing = lambda task: (headers for headers in [{}])
    tasks.nothing.enqueue()
    assert claim()[0].meta == "{}"


@pytest.mark.parametrize("meta", ["{}", "[]", '{"headers": 3}', '{"headers": {"recorder": "x"}}', '{"a": "headers"}'])
def test_malformed_headers_are_ignored(meta):
    assert headers_of(meta, "recorder") == {}


def test_the_name_of_the_headers_is_reserved():
    with pytest.raises(TaskOptionError, match="headers"):
        tasks.nothing.using(meta={"headers": {}})


def test_the_redact_setting_hides_headers(recorder, settings):
    """Headers may contain baggage with values of the callers."""
    row = Task.objects.get(pk=tasks.nothing.enqueue().id)
    assert shown(row, "meta") == row.meta
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "REDACT": "tests.db.tasks.test_instrumentation.hide"}
    assert shown(row, "meta")["headers"]["recorder"]["from"] == REDACTED


def hide(path: str, name: str, value: Any) -> Any:
    return REDACTED if name == "from" else value
