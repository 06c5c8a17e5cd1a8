"""Discarding: a failed task is cancelled, and no longer among the failures."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from django.db import transaction

from django_pglock.models import Attempt, Task
from django_pglock.tasks.states import TaskStatus
from tests.db.admin.visits import make
from tests.db.store.test_failures import fail

pytestmark = pytest.mark.django_db


def test_a_discarded_task_leaves_the_failures_and_keeps_its_attempts():
    task, other = fail(fingerprint=7), fail(fingerprint=8)
    ended_at = Task.objects.get(pk=task.pk).finished_at
    assert Task.objects.filter(fingerprint=7).discard() == 1
    task.refresh_from_db()
    assert (task.status, task.fingerprint, task.finished_at) == ("CANCELLED", None, ended_at)
    assert Attempt.objects.filter(task=task).count() == 1
    assert [group.fingerprint for group in Task.objects.failures()] == [8]
    assert Task.objects.filter(pk=task.pk).retry() == 1, "who has discarded too much can retry"
    other.refresh_from_db()
    assert other.status == "FAILED"


@pytest.mark.parametrize("block", [nullcontext, transaction.atomic], ids=["alone", "in the caller's transaction"])
@pytest.mark.parametrize("status", sorted(set(TaskStatus.values) - {"FAILED"}))
def test_only_failed_tasks_are_discarded(status, block):
    task = make(status)
    with block():
        assert Task.objects.all().discard() == 0
    task.refresh_from_db()
    assert task.status == status


@pytest.mark.django_db(transaction=True)
def test_windows_have_only_failed_tasks():
    failed, _ = make("FAILED"), make("SUCCESSFUL")
    told = []
    assert Task.objects.all().discard(progress=lambda *values: told.append(values)) == 1
    assert told == [(1, failed.pk)]


def test_a_cancel_discards_nothing():
    task = fail(fingerprint=7)
    assert Task.objects.all().cancel() == 0
    task.refresh_from_db()
    assert (task.status, task.fingerprint) == ("FAILED", 7)


@pytest.mark.django_db(transaction=True)
def test_a_task_whose_row_is_locked_is_left_as_it_is(locked):
    """As when a user retries the task at this moment: the discard does not wait, and does not undo the retry."""
    tasks = [fail(fingerprint=7), fail(fingerprint=7)]
    with locked(tasks[0].pk):
        assert Task.objects.all().discard() == 1
    assert [Task.objects.get(pk=task.pk).status for task in tasks] == ["FAILED", "CANCELLED"]
