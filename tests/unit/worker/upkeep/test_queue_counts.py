"""How often and for how long a worker reads the counts of the queues."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from django_pglock.worker.upkeep import queue_counts
from django_pglock.worker.upkeep.queue_counts import READ_FOR, QueueCounts


@pytest.fixture
def clock(monkeypatch):
    """Return the time as a list of one number, and the moments at which counts were read."""
    now, read = [100.0], []
    monkeypatch.setattr(queue_counts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(queue_counts, "shared_counts", lambda using: read.append(now[0]) or [])
    monkeypatch.setattr(queue_counts, "keep_counts", lambda using: read.append(-now[0]))
    return now, read


def test_counts_are_read_every_ten_seconds_despite_frequent_requests(clock):
    (now, read), counts = clock, QueueCounts("default")
    for second in range(100):
        now[0] = 100.0 + second
        counts.request()
        counts.run_if_due()
    assert {later - earlier for earlier, later in itertools.pairwise(read)} == {10.0}


def test_counts_are_read_only_while_they_are_requested(clock):
    (now, read), counts = clock, QueueCounts("default")
    counts.run_if_due()
    assert not read
    counts.request()
    now[0] += READ_FOR - 1
    counts.run_if_due()
    assert read == [now[0]]


def test_without_requests_a_worker_checks_every_twenty_seconds_that_some_worker_counts(clock):
    (now, read), counts = clock, QueueCounts("default")
    for second in range(100):
        now[0] = 100.0 + second
        counts.run_if_due()
    assert read == [-120.0, -140.0, -160.0, -180.0], "and reads nothing"
