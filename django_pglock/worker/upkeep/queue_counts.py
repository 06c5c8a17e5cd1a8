"""How many tasks are in each queue, for metrics and for the pages of the admin."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from django_pglock.store.shared_counts import BETWEEN_COUNTS, TOO_OLD, SharedCount, keep_counts, shared_counts

#: Seconds for which the counts are read after the last call of ``ask()``.
READ_FOR = 600.0
#: Seconds between two checks whether some worker counts, while nobody asks this one.
CHECK_INTERVAL = 20.0


class QueueCounts:
    """The tasks of each queue, read by the upkeep while somebody asks. Else the upkeep only lets them be counted.

    ``ask()`` waits for nothing and returns what was read last. So however often it is called, the worker reads no more
    often than every ``BETWEEN_COUNTS`` seconds, and no session is needed for it.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        self._asked_at = -math.inf
        self._read_at = -math.inf
        self._kept_at = time.monotonic()
        self._counts: dict[str, SharedCount] = {}

    def ask(self) -> dict[str, SharedCount]:
        """Return the counts by queue; empty: not known. A queue that once had tasks stays, with zeros."""
        self._asked_at = time.monotonic()
        return self._counts if self._asked_at - self._read_at < TOO_OLD else {}

    @property
    def is_asked(self) -> bool:
        """Whether somebody has asked lately."""
        return time.monotonic() - self._asked_at < READ_FOR

    def look(self, patience: float = 1.0) -> None:
        """Read the counts, if it is time to and somebody has asked lately; else ensure that some worker counts.

        ``patience``: how many times less often to ensure that, for a worker that is not on duty.
        """
        now = time.monotonic()
        if not self.is_asked and now - self._kept_at >= CHECK_INTERVAL * patience:
            self._kept_at = now
            keep_counts(self.using)
        if self.is_asked and now - self._read_at >= BETWEEN_COUNTS:
            found = {each.queue: each for each in shared_counts(self.using)}
            gone = {queue: _emptied(each) for queue, each in self._counts.items() if queue not in found}
            self._counts = {**found, **gone}
            self._read_at = now


def _emptied(count: SharedCount) -> SharedCount:
    return replace(count, ready=0, blocked=0, scheduled=0, running=0, failed=0, oldest_ready=None, is_paused=False)
