"""How long a worker that may rest waits until its next beat, by a clock that the test moves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from django_pglock.conf import get_settings
from django_pglock.worker.identity import Identity
from django_pglock.worker.in_flight import InFlight
from django_pglock.worker.liveness import heartbeat
from django_pglock.worker.liveness.heartbeat import Heartbeat
from django_pglock.worker.liveness.rest import REST_JITTER, Rest


class Resting(Heartbeat):
    """A heartbeat that may rest. Its waits take no time."""

    def __init__(self):
        process, rest = SimpleNamespace(report_beat=lambda: None), Rest(is_possible=True)
        super().__init__(InFlight(1), "default", Identity(), [], process=process, rest=rest)
        self.rest.note_reply(may_rest=True)
        self.now = 0.0
        #: Called in each wait with the seconds since the last beat; returns whether a beat is requested then.
        self.asks = lambda age: False

    def _wait(self, seconds):
        self.now += seconds
        if self.asks(self.now - self._beat):
            self.rest.request_beat()

    def next_beat(self):
        """Return after how many intervals the next beat comes."""
        interval, self._beat = get_settings().HEARTBEAT_INTERVAL, self.now
        self.rest.end()
        self._wait_for_next_beat(interval)
        return (self.now - self._beat) / interval


@pytest.fixture
def resting(monkeypatch):
    made = Resting()
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_after_a_requested_beat_many_workers_do_not_rest(resting):
    """One task makes all workers beat at once. If the older ones die then, another worker must notice it soon."""
    soon = 0
    for _ in range(300):
        resting.asks = lambda age: age > 1
        while resting.next_beat() == pytest.approx(1):
            pass
        resting.asks = lambda age: False
        soon += resting.next_beat() == pytest.approx(1)
    assert soon > 120, "they beat so late that tasks of the dead may wait for more than ten seconds"


def test_a_worker_may_rest_again_after_a_full_rest(resting):
    while resting.next_beat() == pytest.approx(1):
        pass
    for _ in range(100):
        assert 1 + 2 * REST_JITTER[0] <= resting.next_beat() <= 1 + 2 * REST_JITTER[1]


def test_a_worker_that_is_requested_between_two_parts_of_its_rest_beats_at_once(resting):
    waits = []

    def asks(age):
        waits.append(age)
        return len(waits) == 2

    while resting.next_beat() == pytest.approx(1):
        pass
    resting.asks = asks
    resting.next_beat()
    assert len(waits) == 2, "it has forgotten that somebody waits for it"
