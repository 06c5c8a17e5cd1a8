"""Workers that are asked for metrics at the same moment: one of them counts."""

from __future__ import annotations

import pytest
from django.db.models.functions import Now

from django_pglock.models import Queue, QueueCount, Task
from django_pglock.store import shared_counts
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)

WORKERS = 6


def test_of_several_workers_one_counts_the_queues(in_threads, monkeypatch):
    counted = []
    count = shared_counts.queue_counts
    monkeypatch.setattr(shared_counts, "queue_counts", lambda using: counted.append(1) or count(using))
    for _ in range(3):
        tasks.nothing.using(queue_name="mail").enqueue()
    Queue.objects.pause("bulk")

    in_threads(lambda _: shared_counts.shared_counts("default"), WORKERS)
    assert len(counted) == 1
    found = {each.queue: each for each in shared_counts.shared_counts("default")}
    assert (found["mail"].ready, found["mail"].is_paused, found["bulk"].is_paused) == (3, False, True)
    assert found["mail"].oldest_ready > 0
    assert len(counted) == 1

    # When the next count is due, the counts of queues without tasks are deleted.
    Task.objects.all().delete()
    Queue.objects.resume("bulk")
    QueueCount.objects.update(count_again_at=Now())
    in_threads(lambda _: shared_counts.shared_counts("default"), WORKERS)
    assert len(counted) == 2
    assert shared_counts.shared_counts("default") == []
