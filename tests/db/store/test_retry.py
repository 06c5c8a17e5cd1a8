"""Failed tasks, retried by a person."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models.functions import Now

from django_pglock.models import Task
from django_pglock.store.outcome import Failed, Failure
from django_pglock.store.settle import settle
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_people_retry_what_failed_with_all_its_retries(claim):
    tasks.nothing.enqueue()
    [mine] = claim()
    settle("default", [(mine, Failed(Failure("builtins.ValueError", "")))], mine.worker)
    assert Task.objects.all().retry() == 1
    assert Task.objects.all().retry() == 0
    row = Task.objects.get()
    assert (row.status, row.worker, row.finished_at) == ("READY", None, None)


def test_a_retried_task_begins_anew(claim):
    """Else a task that failed at its last retry would fail again at once, or be deleted while it waits."""
    tasks.nothing.using(keep_result=60).enqueue()
    [mine] = claim()
    settle("default", [(mine, Failed(Failure("builtins.ValueError", "")))], mine.worker)
    assert Task.objects.get().expires_at is not None
    spent = {"retries": 3, "rescues": 2, "progress": {"done": 1}, "meta": {"snoozes": 4, "trace": "a"}}
    Task.objects.update(**spent, run_after=Now() + timedelta(hours=1), cancel_requested_at=Now())
    assert Task.objects.all().retry() == 1
    row = Task.objects.get()
    assert (row.retries, row.rescues, row.progress, row.meta) == (0, 0, None, {"trace": "a"})
    assert (row.run_after, row.expires_at, row.cancel_requested_at) == (None, None, None)
    assert row.attempts == 1, "the token only grows"


@pytest.mark.parametrize("status", ["SCHEDULED", "READY", "RUNNING", "SUCCESSFUL"])
def test_only_what_failed_or_was_cancelled_is_retried(claim, status):
    tasks.nothing.enqueue()
    if status in ("RUNNING", "SUCCESSFUL"):
        claim()
    is_finished = status == "SUCCESSFUL"
    Task.objects.update(status=status, run_after=Now(), finished_at=Now() if is_finished else None)
    before = Task.objects.values().get()
    assert Task.objects.all().retry() == 0
    assert Task.objects.values().get() == before


def test_retried_tasks_of_one_key_run_one_at_a_time_again():
    for number in range(2):
        keyed.step.enqueue(1, number)
    assert Task.objects.all().cancel() == 2
    assert Task.objects.all().retry() == 2
    assert list(Task.objects.order_by("id").values_list("status", flat=True)) == ["READY", "BLOCKED"]
