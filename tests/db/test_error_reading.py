"""A function may raise any exception. Its attempt fails with a text that people can read, and the worker continues."""

from __future__ import annotations

from itertools import cycle, product

import pytest
from django.dispatch import Signal

from django_pglock.models import Attempt, Task
from django_pglock.tasks import instrumentation
from django_pglock.tasks.compat import task_finished
from tests.sample import tasks, throwing_tasks

pytestmark = pytest.mark.django_db(transaction=True)

FUNCTIONS = (
    throwing_tasks.throw_in_thread,
    throwing_tasks.throw_atomically,
    throwing_tasks.throw_in_coroutine,
    throwing_tasks.throw_and_read_in_backoff,
    throwing_tasks.throw_in_group,
)


@pytest.fixture
def run_all(worker, eventually):
    """Run tasks, and then one more, and check that no part of the worker has ended."""

    def run(results):
        running = worker(threads=2)
        unfinished = Task.objects.filter(finished_at=None)
        parts = [*running.services, running.executor]
        eventually(lambda: not unfinished.exists() or any(part.is_missing for part in parts))
        assert not any(part.is_missing for part in parts)
        for last in (tasks.echo.enqueue(1), tasks.sleep_async.enqueue(0)):
            eventually(lambda last=last: Task.objects.get(pk=last.id).status == "SUCCESSFUL")
        eventually(lambda: not running.in_flight.claims)
        return [(what, Task.objects.get(pk=result.id)) for what, result in results.items()]

    return run


@pytest.mark.parametrize("how", ["alone", "with cause"])
def test_each_exception_fails_its_attempts_and_nothing_else(run_all, how):
    kinds = list(product(throwing_tasks.HOSTILE, FUNCTIONS))
    if how != "alone":
        # The cause is read where the exception is read, so each kind needs one of the functions only.
        kinds = list(zip(throwing_tasks.HOSTILE, cycle(FUNCTIONS)))
    for (kind, function), row in run_all({each: each[1].enqueue(kind=f"{each[0]} {how}") for each in kinds}):
        said = f"{kind} in {function.name}"
        assert (row.status, row.retries) == ("FAILED", 1), said
        last = Attempt.objects.filter(task_id=row.pk).latest("number")
        assert last.exception_path == path_of(kind), said
        assert "throwing_tasks.py" in last.traceback, said
        assert "raise HOSTILE[name]()" in last.traceback, said
        assert kind in last.traceback.splitlines()[-1], said


def path_of(kind):
    return f"tests.sample.throwing_tasks.{kind}"


def test_an_exception_that_is_only_a_cause_changes_nothing(run_all):
    kinds = list(throwing_tasks.HOSTILE)
    for kind, row in run_all({each: throwing_tasks.throw_in_thread.enqueue(f"{each} as cause") for each in kinds}):
        assert (row.status, row.retries) == ("FAILED", 1), kind
        last = Attempt.objects.filter(task_id=row.pk).latest("number")
        assert last.exception_path == "builtins.ValueError", kind
        assert "ValueError: because of another one" in last.traceback.splitlines()[-1], kind


def test_exceptions_of_a_return_value(run_all):
    for kind, row in run_all(
        {each: throwing_tasks.return_what_throws.enqueue(each) for each in throwing_tasks.HOSTILE}
    ):
        last = Attempt.objects.filter(task_id=row.pk).latest("number")
        assert (row.status, row.retries) == ("FAILED", 0), kind
        assert last.exception_path == "django_pglock.errors.TaskResultError", kind


def test_exceptions_instead_of_the_timeout(run_all):
    kinds = list(throwing_tasks.HOSTILE)
    for kind, row in run_all({each: throwing_tasks.throw_after_timeout.enqueue(each) for each in kinds}):
        last = Attempt.objects.filter(task_id=row.pk).latest("number")
        assert (row.status, row.retries) == ("FAILED", 1), kind
        assert last.exception_path in (path_of(kind), "django_pglock.errors.TaskTimeout"), kind


class Watching:
    """An instrument and a receiver that read each exception, and raise it."""

    name = "watching"

    def enqueuing(self, task):
        yield {}

    def running(self, attempt):
        outcome = yield
        if getattr(outcome, "failure", None) is not None:
            raise outcome.failure.exception

    def receive(self, task_result, **kwargs):
        if task_result.errors:
            raise throwing_tasks.NoText


def test_instruments_and_receivers_may_raise_them(run_all):
    watching = Watching()
    signal: Signal = task_finished
    signal.connect(watching.receive)
    instrumentation.add(watching)
    try:
        kinds = list(throwing_tasks.HOSTILE)
        for kind, row in run_all({each: throwing_tasks.throw_in_thread.enqueue(each) for each in kinds}):
            assert (row.status, row.retries) == ("FAILED", 1), kind
    finally:
        instrumentation.remove("watching")
        signal.disconnect(watching.receive)
