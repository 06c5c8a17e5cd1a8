"""The numbers that the metrics of a worker show, read from the database while they are requested."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from django_pglock.store.count import COUNTED, QueueCounts
from django_pglock.store.numbers import MAX_AGE, Total, counters, depths

#: Seconds between two readings, and for which the upkeep reads after the last call of ``request()``.
BETWEEN_READINGS, READ_FOR = 10.0, 600.0


class Readings:
    """The depths of the queues and the counters of attempts. The upkeep reads them while clients request them.

    ``request()`` does not wait. It returns what the upkeep has read last. So it needs no session.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        self._requested_at = self._read_at = -math.inf
        self._depths: Sequence[QueueCounts] = ()
        self._counters: Sequence[Total] = ()

    def request(self) -> tuple[Sequence[QueueCounts], Sequence[Total]]:
        """Return depths and counters; both empty if they are not known."""
        self._requested_at = time.monotonic()
        return (self._depths, self._counters) if self._requested_at - self._read_at < MAX_AGE else ((), ())

    @property
    def is_requested(self) -> bool:
        """Whether a client has requested the numbers lately."""
        return time.monotonic() - self._requested_at < READ_FOR

    def run_if_due(self) -> None:
        """Read the numbers if they are due and requested. A queue that has become empty stays, with zeros."""
        now = time.monotonic()
        if self.is_requested and now - self._read_at >= BETWEEN_READINGS:
            found = {each.queue: each for each in depths(self.using)}
            empty = dict.fromkeys(COUNTED, 0)
            gone = [QueueCounts.of(each.queue, empty, None, None) for each in self._depths if each.queue not in found]
            self._depths, self._counters = [*found.values(), *gone], counters(self.using)
            self._read_at = now
