"""How many tasks are ready, for metrics."""

from __future__ import annotations

import math
import time

from django_pglock.store.count import ready_counts

#: Seconds between two counts, at least and at most.
BETWEEN_COUNTS, LONGEST_BETWEEN_COUNTS = 10.0, 40.0
#: The age in seconds at which a count is too old to return: then the database cannot be reached.
TOO_OLD = 60.0
#: How many times as long as a count took until the next one. Each worker counts, and there may be forty.
REST = 200
#: Seconds after the last question after which nothing is counted any more.
INTEREST = 600.0


class ReadyCounts:
    """The ready tasks of each queue, counted by the upkeep while somebody asks.

    ``ask()`` waits for nothing and returns the last count. So however often it is called, the database counts no more
    often than every ``BETWEEN_COUNTS`` seconds, less often if a count takes long, and no session is needed for it.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        self._asked_at = -math.inf
        self._counted_at = -math.inf
        self._took = 0.0
        self._counts: dict[str, tuple[int, float]] = {}

    def ask(self) -> dict[str, tuple[int, float]]:
        """Return for each queue the number of ready tasks and the age of the oldest in seconds; empty: not known.

        A queue that once had ready tasks stays, with zero.
        """
        self._asked_at = time.monotonic()
        return self._counts if self._asked_at - self._counted_at < TOO_OLD else {}

    def look(self) -> None:
        """Count, if it is time to and somebody has asked lately."""
        now = time.monotonic()
        rest = max(BETWEEN_COUNTS, min(LONGEST_BETWEEN_COUNTS, REST * self._took))
        if now - self._asked_at < INTEREST and now - self._counted_at >= rest:
            found = {queue: (count, age or 0.0) for queue, (count, age) in ready_counts(self.using).items()}
            self._counts = {**dict.fromkeys(self._counts, (0, 0.0)), **found}
            self._counted_at = now
            self._took = time.monotonic() - now
