"""Result objects and signals of tasks that succeed are not made when there is no receiver."""

from __future__ import annotations

import logging

import pytest

from django_pglock.models import Task
from django_pglock.tasks.compat import TaskResultStatus, task_finished, task_started
from django_pglock.worker.child import attempt, logs
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def made(monkeypatch):
    """The results that are made while the log of django.tasks is disabled."""
    results = []
    make = attempt.make_result

    def note(*args, **kwargs):
        results.append(kwargs["id"])
        return make(*args, **kwargs)

    monkeypatch.setattr(attempt, "make_result", note)
    monkeypatch.setattr(logs.PACKAGE_LOGGER, "level", logging.WARNING)
    logs.PACKAGE_LOGGER.manager._clear_cache()
    yield results
    monkeypatch.undo()
    logs.PACKAGE_LOGGER.manager._clear_cache()


def run(worker, eventually, *results):
    worker(threads=1)
    ids = [result.id for result in results]
    return eventually(
        lambda: len(rows := list(Task.objects.filter(pk__in=ids, finished_at__isnull=False))) == len(ids) and rows
    )


def test_a_success_without_receivers_makes_no_result(made, worker, eventually):
    rows = run(worker, eventually, tasks.nothing.enqueue(), tasks.echo.enqueue(5))
    assert {row.status for row in rows} == {"SUCCESSFUL"}
    assert made == []


def test_a_failure_always_makes_a_result_and_a_log_record(made, worker, eventually, caplog):
    run(worker, eventually, tasks.fail.enqueue())
    assert len(made) == 1
    eventually(lambda: "failed" in caplog.text)


@pytest.mark.parametrize("signal", [task_started, task_finished])
def test_a_signal_receiver_gets_the_result_of_a_success(made, worker, eventually, signal):
    heard = []
    signal.connect(receiver := lambda sender, task_result, **kwargs: heard.append(task_result))
    try:
        run(worker, eventually, tasks.echo.enqueue(5))
        [result] = eventually(lambda: heard)
    finally:
        signal.disconnect(receiver)
    assert len(made) == 1
    if signal is task_finished:
        assert (result.status, result.return_value) == (TaskResultStatus.SUCCESSFUL, 5)
