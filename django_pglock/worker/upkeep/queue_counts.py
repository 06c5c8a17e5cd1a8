"""The number of tasks in each queue, for metrics and for the pages of the admin."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from django_pglock.store.shared_counts import (
    BETWEEN_COUNTS,
    MAX_AGE_FOR_METRICS,
    SharedCount,
    keep_counts,
    shared_counts,
)

#: Seconds for which the counts are read after the last call of ``request()``.
READ_FOR = 600.0
#: Seconds between two checks whether some worker counts, while no client requests the counts from this one.
CHECK_INTERVAL = 20.0


class QueueCounts:
    """The number of tasks in each queue. The upkeep reads it while clients request it.

    ``request()`` does not wait. It returns what the upkeep has read last. So it needs no session, and the worker reads
    the counts at most every ``BETWEEN_COUNTS`` seconds, however often ``request()`` is called.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        self._requested_at = -math.inf
        self._read_at = -math.inf
        self._kept_at = time.monotonic()
        self._counts: dict[str, SharedCount] = {}

    def request(self) -> dict[str, SharedCount]:
        """Return the counts by queue; empty: not known. A queue that has become empty is returned with zeros."""
        self._requested_at = time.monotonic()
        return self._counts if self._requested_at - self._read_at < MAX_AGE_FOR_METRICS else {}

    @property
    def is_requested(self) -> bool:
        """Whether a client has requested the counts lately."""
        return time.monotonic() - self._requested_at < READ_FOR

    def run_if_due(self, interval_factor: float = 1.0) -> None:
        """Read the counts if they are due and requested. If they are not requested, ensure that some worker counts.

        ``interval_factor``: a standby worker multiplies the interval of this check by this factor.
        """
        now = time.monotonic()
        if not self.is_requested and now - self._kept_at >= CHECK_INTERVAL * interval_factor:
            self._kept_at = now
            keep_counts(self.using)
        if self.is_requested and now - self._read_at >= BETWEEN_COUNTS:
            found = {each.queue: each for each in shared_counts(self.using)}
            gone = {queue: _emptied(each) for queue, each in self._counts.items() if queue not in found}
            self._counts = {**found, **gone}
            self._read_at = now


def _emptied(count: SharedCount) -> SharedCount:
    return replace(count, ready=0, blocked=0, scheduled=0, running=0, failed=0, oldest_ready=None, is_paused=False)
