"""How many tasks are ready, for those who ask now and then."""

from __future__ import annotations

import math
import time

from django_pglock.store.count import ready_counts

#: Seconds between two counts, and the age at which a count is not told any more: the database is away.
BETWEEN_COUNTS, TOO_OLD = 10.0, 60.0
#: Seconds after which nobody is taken to be interested any more.
INTEREST = 600.0


class ReadyCounts:
    """The ready tasks of each queue, counted by the upkeep while somebody asks.

    Who asks waits for nothing and gets the last count. So however often that is, the database is asked as seldom as if
    nobody did; and there is no session for it.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        self._asked_at = -math.inf
        self._counted_at = -math.inf
        self._counts: dict[str, tuple[int, float]] = {}

    def ask(self) -> dict[str, tuple[int, float]]:
        """Return for each queue the ready tasks and the age of the oldest in seconds; nothing if that is not known.

        A queue that once had something stays, with zero.
        """
        self._asked_at = time.monotonic()
        return self._counts if self._asked_at - self._counted_at < TOO_OLD else {}

    def look(self) -> None:
        """Count, if it is time to and somebody wants to know."""
        now = time.monotonic()
        if now - self._asked_at < INTEREST and now - self._counted_at >= BETWEEN_COUNTS:
            found = {queue: (count, age or 0.0) for queue, (count, age) in ready_counts(self.using).items()}
            self._counts = {**dict.fromkeys(self._counts, (0, 0.0)), **found}
            self._counted_at = now
