"""The cache of the names of queues with ready tasks."""

from __future__ import annotations

import pytest

from django_pglock.worker.claiming import ready_queues
from django_pglock.worker.claiming.queue_cursor import LIFETIME_FACTOR, LONGEST_LIFETIME
from django_pglock.worker.claiming.ready_queues import ReadyQueues


class Rows:
    """Replaces the table: each query takes some time."""

    def __init__(self, takes):
        self.now, self.takes, self.looks = 100.0, takes, 0

    def clock(self):
        return self.now

    def ready_queues(self, using):
        self.looks += 1
        self.now += self.takes
        return [f"look {self.looks}"]


@pytest.fixture
def table(monkeypatch):
    def make(takes):
        rows = Rows(takes)
        monkeypatch.setattr(ready_queues, "ready_queues", rows.ready_queues)
        return rows

    return make


def test_ready_queues_are_cached_for_a_multiple_of_the_query_time(table):
    rows = table(takes=0.001)
    ready = ReadyQueues("default", clock=rows.clock)
    assert (ready.names(), ready.is_from_memory) == (["look 1"], False)
    rows.now += LIFETIME_FACTOR * 0.001 * 0.9
    assert (ready.names(), ready.is_from_memory) == (["look 1"], True)
    rows.now += LIFETIME_FACTOR * 0.001 * 0.2
    assert (ready.names(), ready.is_from_memory) == (["look 2"], False)


def test_ready_queues_are_cached_no_longer_than_a_limit(table):
    rows = table(takes=3.0)
    ready = ReadyQueues("default", clock=rows.clock)
    ready.names()
    rows.now += LONGEST_LIFETIME
    assert ready.names() == ["look 2"]


def test_clear_removes_the_cached_ready_queues(table):
    rows = table(takes=1.0)
    ready = ReadyQueues("default", clock=rows.clock)
    ready.names()
    ready.clear()
    assert (ready.names(), ready.is_from_memory) == (["look 2"], False)
