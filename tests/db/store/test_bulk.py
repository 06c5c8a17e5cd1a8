"""Bulk changes as tasks: their progress, their cancel, and a second run after a crash."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models.functions import Now

from django_pglock.errors import ConfigurationError, TaskCancelled, TaskStopped
from django_pglock.models import Task
from django_pglock.store import bulk
from django_pglock.store.operate import CANCEL, RETRY
from django_pglock.tasks.claim import TaskContext
from django_pglock.tasks.queues import OWN_QUEUE
from tests.db.admin.visits import make

pytestmark = pytest.mark.django_db(transaction=True)


def statuses(rows):
    return [Task.objects.get(pk=row.pk).status for row in rows]


@pytest.mark.parametrize(
    "served",
    [
        {},
        {"queues": ["mail"]},
        {"queues": ["mail=2"]},
        {"exclude": ["elsewhere", "django*"]},
        {"backend": "urgent"},
    ],
)
def test_each_worker_runs_a_bulk_change_whatever_it_serves(worker, eventually, served, settings):
    settings.TASKS = {**settings.TASKS, "urgent": settings.TASKS["default"]}
    rows = [make("FAILED", queue="elsewhere") for _ in range(3)]
    [made] = bulk.enqueue_change("default", RETRY, [row.pk for row in rows[:2]])
    worker(**{"exclude": ["elsewhere"], **served})
    ended = eventually(lambda: Task.objects.filter(pk=made, status="SUCCESSFUL").first())
    assert ended.result == 2
    assert statuses(rows) == ["READY", "READY", "FAILED"], "only those that a person has confirmed"


def context_of(claim, reason=lambda: None):
    [mine] = claim(queue=OWN_QUEUE)
    result = bulk.change_tasks.get_result(str(mine.id))
    return TaskContext(task_result=result, _claims=[mine], _reason_to_stop=reason), mine


def test_a_cancelled_bulk_change_ends_after_the_current_window(claim, monkeypatch):
    monkeypatch.setattr(bulk, "WINDOW", 2)
    rows = [make("FAILED", queue="elsewhere") for _ in range(5)]
    bulk.enqueue_change("default", RETRY, [row.pk for row in rows])
    answers = iter([None, None, TaskCancelled("somebody has asked")])
    context, mine = context_of(claim, lambda: next(answers))
    with pytest.raises(TaskStopped):
        bulk.change_tasks.func(context, "retry", [row.pk for row in rows])
    assert statuses(rows) == ["READY"] * 4 + ["FAILED"]
    progress = Task.objects.get(pk=mine.id).progress
    assert (progress["done"], progress["total"]) == (4, 5)


def test_a_bulk_change_whose_worker_died_continues_behind_its_last_batch(claim, monkeypatch):
    monkeypatch.setattr(bulk, "WINDOW", 2)
    rows = [make("FAILED", queue="elsewhere") for _ in range(3)]
    ids = [row.pk for row in rows]
    bulk.enqueue_change("default", RETRY, ids)
    answers = iter([None, TaskCancelled("as if it were killed here")])
    context, mine = context_of(claim, lambda: next(answers))
    with pytest.raises(TaskStopped):
        bulk.change_tasks.func(context, "retry", ids)
    Task.objects.filter(pk=mine.id).update(status="READY", worker=None)
    Task.objects.filter(pk=ids[0]).update(status="FAILED", finished_at=Now() - timedelta(days=1))
    context, _ = context_of(claim)
    assert bulk.change_tasks.func(context, "retry", ids) == 3, "of both attempts"
    assert statuses(rows) == ["FAILED", "READY", "READY"], "the first batch is not repeated"


def test_a_repeated_bulk_retry_does_not_retry_tasks_that_failed_again(claim):
    """The first run has retried the task, which then failed again."""
    row = make("FAILED", queue="elsewhere")
    bulk.enqueue_change("default", RETRY, [row.pk])
    context, _ = context_of(claim)
    Task.objects.filter(pk=row.pk).update(finished_at=Now() + timedelta(seconds=1))
    assert bulk.change_tasks.func(context, "retry", [row.pk]) == 0


def test_a_bulk_change_of_too_many_ids_is_several_tasks(monkeypatch):
    monkeypatch.setattr(bulk, "MOST_IDS", 2)
    made = bulk.enqueue_change("default", CANCEL, [3, 2, 1])
    assert [Task.objects.get(pk=each).args for each in made] == [["cancel", [3, 2]], ["cancel", [1]]]


def test_a_database_without_a_backend_is_refused():
    with pytest.raises(ConfigurationError, match="'elsewhere'"):
        bulk.enqueue_change("elsewhere", CANCEL, [1])
