"""Tasks that have not begun by their date."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from django_pglock.models import Task
from django_pglock.testing import run_tasks
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def aged(seconds):
    """Make all tasks older, as if nobody had run them for this time."""
    Task.objects.update(enqueued_at=timezone.now() - timedelta(seconds=seconds))


@pytest.mark.parametrize(
    "expires", [30, timedelta(seconds=30), timezone.now() - timedelta(seconds=1), timezone.now().replace(tzinfo=None)]
)
def test_a_task_that_has_not_begun_by_its_date_is_cancelled_with_the_reason(expires):
    result = tasks.record.using(expires=expires).enqueue("never")
    after = tasks.nothing.using(after=result).enqueue()
    aged(60)
    run_tasks()
    result.refresh()
    assert [error.exception_class_path for error in result.errors] == ["django_pglock.errors.TaskExpired"]
    assert Task.objects.get(pk=result.id).status == Task.objects.get(pk=after.id).status == "CANCELLED"
    assert not tasks.Effect.objects.exists()


@pytest.mark.parametrize("expires", [3600, timezone.now() + timedelta(hours=1)])
def test_a_task_that_begins_in_time_runs(expires):
    tasks.record.using(expires=expires).enqueue("in time")
    run_tasks()
    assert tasks.Effect.objects.count() == 1


def test_a_task_that_has_begun_does_not_expire():
    result = tasks.record.using(expires=30).enqueue("again")
    aged(60)
    Task.objects.update(started_at=timezone.now())
    run_tasks()
    result.refresh()
    assert result.status == "SUCCESSFUL"
