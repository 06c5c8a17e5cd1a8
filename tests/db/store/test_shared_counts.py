"""The counts that one worker makes for all workers."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from uuid import uuid4

import pytest
from django.db.models.functions import Now

from django_pglock.models import Queue, QueueCount, Task
from django_pglock.store import shared_counts
from tests.sample import tasks

pytestmark = pytest.mark.django_db


def test_a_count_that_takes_long_is_made_less_often(monkeypatch):
    monkeypatch.setattr(shared_counts, "PAUSE_FACTOR", 1e9)
    shared_counts.shared_counts("default")
    [row] = QueueCount.objects.all()
    assert 39 < (row.count_again_at - row.counted_at).total_seconds() < 41


def test_the_pause_between_two_counts_is_a_multiple_of_the_time_that_a_count_takes(monkeypatch):
    moments = iter([10.0, 10.1])
    monkeypatch.setattr(shared_counts, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    monkeypatch.setattr(shared_counts, "PAUSE_FACTOR", 200.0)
    shared_counts.shared_counts("default")
    [row] = QueueCount.objects.all()
    assert 19 < (row.count_again_at - row.counted_at).total_seconds() < 21


def test_one_worker_counts_when_a_count_is_due_and_without_requests_when_it_is_overdue(monkeypatch):
    counted = []
    monkeypatch.setattr(shared_counts, "_count", lambda using, count_id: counted.append(count_id))
    shared_counts.shared_counts("default")
    shared_counts.shared_counts("default")
    assert len(counted) == 1, "the first worker still counts"
    QueueCount.objects.update(count_again_at=Now())
    shared_counts.keep_counts("default")
    assert len(counted) == 1
    QueueCount.objects.update(count_again_at=Now() - timedelta(seconds=shared_counts.OVERDUE_WITHOUT_REQUEST))
    shared_counts.keep_counts("default")
    assert len(counted) == 2


def test_outdated_counts_are_not_shown(monkeypatch):
    tasks.nothing.enqueue()
    assert shared_counts.shared_counts("default")
    monkeypatch.setattr(shared_counts, "MAX_AGE_FOR_METRICS", 0.0)
    assert shared_counts.shared_counts("default") == []


def test_a_later_count_replaces_each_number_of_an_earlier_one():
    tasks.nothing.enqueue()
    [earlier] = shared_counts.shared_counts("default")
    assert (earlier.ready, earlier.blocked, earlier.scheduled, earlier.running, earlier.failed) == (1, 0, 0, 0, 0)
    statuses = ["READY"] * 5 + ["BLOCKED"] * 4 + ["SCHEDULED"] * 3 + ["RUNNING"] * 2 + ["FAILED"]
    for status in statuses[1:]:
        dates = {"started_at": Now(), "last_attempted_at": Now(), "run_after": Now()}
        finished_at = Now() if status == "FAILED" else None
        row = {"queue": "default", "backend": "default", "task_path": "x", "worker": uuid4(), "waits_for": 1}
        Task.objects.create(**row, **dates, status=status, finished_at=finished_at)
    Queue.objects.pause("default")
    QueueCount.objects.update(count_again_at=Now())
    [later] = shared_counts.shared_counts("default")
    assert (later.ready, later.blocked, later.scheduled, later.running, later.failed) == (5, 4, 3, 2, 1)
    assert later.is_paused
    assert later.oldest_ready > earlier.oldest_ready
    Task.objects.update(queue="new")
    Queue.objects.resume("default")
    QueueCount.objects.update(count_again_at=Now())
    assert [each.queue for each in shared_counts.shared_counts("default")] == ["new"]
