"""What the upkeep adds to the history: attempts that ended with their workers."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest
from django.db.models.functions import Now

from django_pglock.conf import get_settings
from django_pglock.models import Task, TaskHistory
from django_pglock.store.history import KEPT, Counts, add_history
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_attempts_that_were_lost_with_their_workers_are_counted(worker, claim, eventually):
    for _ in range(4):
        tasks.nothing.enqueue()
    poison, cancelled, *_ = claim(4)
    Task.objects.filter(pk=poison.id).update(rescues=get_settings().MAX_RESCUES)
    Task.objects.filter(pk=cancelled.id).update(cancel_requested_at=Now())
    worker(queues=["another"])
    eventually(lambda: TaskHistory.objects.filter(seconds=60, queue="").exists())
    [row] = TaskHistory.objects.filter(seconds=60, task_path=tasks.nothing.module_path)
    assert (row.lost, row.failed, row.cancelled, row.succeeded, sum(row.wait)) == (2, 1, 1, 0, 0)


def test_old_rows_are_deleted(worker, eventually):
    old = int(datetime.now(timezone.utc).timestamp() // 3600 * 3600) - KEPT[3600] - 3600
    add_history("default", {(old, "mail", "app.send"): Counts(succeeded=1)})
    worker()
    eventually(lambda: not TaskHistory.objects.exists())
