"""The function that is enqueued when a task has failed for good."""

from __future__ import annotations

import math

import pytest
from django.db import IntegrityError

from django_pglock.errors import TaskOptionError
from django_pglock.models import Task, Worker
from django_pglock.store import enqueue as enqueueing
from django_pglock.store.outcome import Cancelled, Failed, Interrupted, Retried, Snoozed, Succeeded
from django_pglock.store.rescue import rescue
from tests.db.store.endings import FAILURE, settle_one
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def raises(error):
    def refuse(*values, **options):
        raise error

    return refuse


def handlers():
    return list(Task.objects.filter(task_path=tasks.echo.module_path).values_list("args", "status", "queue"))


def test_it_is_enqueued_with_the_id_when_the_last_attempt_has_failed(claim):
    failed = tasks.nothing.using(on_failure=tasks.echo, max_attempts=2).enqueue()
    settle_one(claim()[0], Retried(FAILURE, 0))
    assert handlers() == []
    settle_one(claim()[0], Failed(FAILURE))
    assert handlers() == [([int(failed.id)], "READY", "default")]


@pytest.mark.parametrize(
    "outcome",
    [Succeeded(), Cancelled(FAILURE), Snoozed(5), Interrupted(FAILURE, 5)],
    ids=lambda each: type(each).__name__,
)
def test_no_other_end_enqueues_it(claim, outcome):
    tasks.nothing.using(on_failure=tasks.echo).enqueue()
    settle_one(claim()[0], outcome)
    assert handlers() == []


def test_a_claim_that_is_lost_enqueues_nothing(claim):
    tasks.nothing.using(on_failure=tasks.echo).enqueue()
    [lost] = claim()
    Task.objects.update(attempts=7)
    settle_one(lost, Failed(FAILURE))
    assert handlers() == []


def test_a_task_whose_worker_died_too_often_enqueues_it(claim):
    failed = tasks.nothing.using(on_failure=tasks.echo).enqueue()
    claim()
    Task.objects.update(rescues=100)
    Worker.objects.all().delete()
    assert [each.status for each in rescue("default", unbroken=math.inf)] == ["FAILED"]
    assert handlers() == [([int(failed.id)], "READY", "default")]


def test_a_function_that_this_process_does_not_know_is_enqueued_by_its_path(claim):
    failed = tasks.nothing.using(on_failure=tasks.echo).enqueue()
    Task.objects.update(meta={"on_failure": "other.tasks.call"})
    settle_one(claim()[0], Failed(FAILURE))
    assert Task.objects.get(task_path="other.tasks.call").args == [int(failed.id)]


def test_the_failed_task_and_the_function_are_written_together(claim, monkeypatch):
    """The process dies between the two statements."""
    tasks.nothing.using(on_failure=tasks.echo).enqueue()
    [mine] = claim()
    with monkeypatch.context() as dying:
        dying.setattr(enqueueing, "enqueue_many", raises(SystemExit))
        with pytest.raises(SystemExit):
            settle_one(mine, Failed(FAILURE))
    assert Task.objects.get().status == "RUNNING"
    settle_one(mine, Failed(FAILURE))
    assert [status for _args, status, _queue in handlers()] == ["READY"]


def test_a_function_that_the_database_refuses_does_not_keep_the_task_from_failing(claim, monkeypatch, caplog):
    tasks.nothing.using(on_failure=tasks.echo).enqueue()
    monkeypatch.setattr(enqueueing, "enqueue_many", raises(IntegrityError))
    settle_one(claim()[0], Failed(FAILURE))
    assert Task.objects.get().status == "FAILED"
    assert "tests.sample.tasks.echo cannot be enqueued" in caplog.text


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (print, "give a function that is decorated with @task"),
        (tasks.record_slowly, "is called with the id of the failed task, but tests.sample.tasks.record_slowly missing"),
        (keyed.refresh.using(lock="a"), "no arguments to make a key of"),
    ],
)
def test_a_function_that_could_not_run_is_refused(function, why):
    with pytest.raises(TaskOptionError, match=why):
        tasks.echo.using(on_failure=function)
