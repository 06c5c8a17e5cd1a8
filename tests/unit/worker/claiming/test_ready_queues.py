"""For how long a worker believes to know which queues have something ready."""

from __future__ import annotations

from django_pglock.worker.claiming.queue_cursor import LIFETIME_FACTOR, LONGEST_LIFETIME
from django_pglock.worker.claiming.ready_queues import ReadyQueues


class Rows:
    """Stands for the table: each look takes some time."""

    def __init__(self, takes):
        self.now, self.takes, self.looks = 100.0, takes, 0

    def clock(self):
        return self.now

    def ready_queues(self):
        self.looks += 1
        self.now += self.takes
        return [f"look {self.looks}"]


def test_an_answer_holds_for_a_multiple_of_what_it_took():
    rows = Rows(takes=0.001)
    ready = ReadyQueues(rows, clock=rows.clock)
    assert (ready.names(), ready.is_from_memory) == (["look 1"], False)
    rows.now += LIFETIME_FACTOR * 0.001 * 0.9
    assert (ready.names(), ready.is_from_memory) == (["look 1"], True)
    rows.now += LIFETIME_FACTOR * 0.001 * 0.2
    assert (ready.names(), ready.is_from_memory) == (["look 2"], False)


def test_not_for_long_however_long_it_took():
    rows = Rows(takes=3.0)
    ready = ReadyQueues(rows, clock=rows.clock)
    ready.names()
    rows.now += LONGEST_LIFETIME
    assert ready.names() == ["look 2"]


def test_an_answer_that_did_not_suffice_is_forgotten():
    rows = Rows(takes=1.0)
    ready = ReadyQueues(rows, clock=rows.clock)
    ready.names()
    ready.forget()
    assert (ready.names(), ready.is_from_memory) == (["look 2"], False)
