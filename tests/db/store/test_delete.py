"""Deleting: finished tasks go with their attempts, and those that are still needed stay."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta

import pytest
from django.db import transaction
from django.db.models.functions import Now

from django_pglock.models import Attempt, Task
from django_pglock.tasks.states import FINISHED, TaskStatus
from tests.db.admin.visits import make
from tests.db.store.test_failures import fail
from tests.sample import tasks

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("block", [nullcontext, transaction.atomic], ids=["alone", "in the caller's transaction"])
def test_only_finished_tasks_are_deleted_with_their_attempts(block):
    fail(fingerprint=7)
    for status in TaskStatus.values:
        make(status)
    with block():
        assert Task.objects.all().delete_finished() == 1 + len(FINISHED)
    assert {*Task.objects.values_list("status", flat=True)} == set(TaskStatus.values) - FINISHED
    assert not Attempt.objects.exists()


def test_only_those_of_the_queryset_are_deleted():
    one, other = make("FAILED"), make("FAILED")
    assert Task.objects.filter(pk=one.pk).delete_finished() == 1
    assert list(Task.objects.values_list("pk", flat=True)) == [other.pk]


@pytest.mark.django_db(transaction=True)
def test_windows_have_only_finished_tasks():
    finished, _ = make("SUCCESSFUL"), make("READY")
    told = []
    assert Task.objects.all().delete_finished(progress=lambda *values: told.append(values)) == 1
    assert told == [(1, finished.pk)]


def test_delete_finished_keeps_tasks_that_are_still_needed():
    awaited = tasks.nothing.enqueue()
    tasks.nothing.using(after=[awaited]).enqueue()
    # As between the end of the task and the release of its dependent.
    Task.objects.filter(pk=awaited.id).update(status="SUCCESSFUL", finished_at=Now())
    make("SUCCESSFUL", unique_key="x", unique_scope="PERIOD", unique_until=Now() + timedelta(hours=1))
    over = make("SUCCESSFUL", unique_key="y", unique_scope="PERIOD", unique_until=Now() - timedelta(hours=1))
    assert Task.objects.all().delete_finished() == 1
    assert Task.objects.count() == 3
    assert not Task.objects.filter(pk=over.pk).exists()


@pytest.mark.django_db(transaction=True)
def test_a_task_whose_row_is_locked_stays(locked):
    """As when a user retries the task at this moment: the delete does not wait, and the retried task is not deleted."""
    rows = [make("FAILED"), make("FAILED")]
    with locked(rows[0].pk):
        assert Task.objects.all().delete_finished() == 1
    assert list(Task.objects.values_list("pk", flat=True)) == [rows[0].pk]
