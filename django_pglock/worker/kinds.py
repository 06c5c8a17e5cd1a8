"""Claiming sync and async functions apart, while only one of the two has room.

The index of what is ready knows queues and priorities, and nothing of functions. A claim for one kind reads past
everything of the other kind that comes first, so it is repeated only as often as it is cheap.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal

from django_pglock.worker.queue_claims import LINE, LONGEST_LINE

#: Which functions a claim is for: those that need a thread, those that need a place of the event loop, or all.
Kind = Literal["sync", "async", "both"]
SYNC: Kind = "sync"
ASYNC: Kind = "async"
BOTH: Kind = "both"

#: Seconds until the next look for a kind of which there was nothing, unless there is news.
PAUSE = 0.05
#: A look is dear that takes more seconds than this for each task that it finds, and for each of the first ten.
DEAR = 0.0005


class Looks:
    """When to look again for tasks of one kind."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._empty_until: dict[Kind, float] = {}
        self._dear_until: dict[Kind, float] = {}

    def note(self, kind: Kind, *, took: float, found: int) -> None:
        """Note a look for this kind, how many seconds it took and how many tasks it found."""
        now = self._clock()
        if not found:
            self._empty_until[kind] = now + PAUSE
        if took > DEAR * max(found, 10):
            self._dear_until[kind] = now + min(LONGEST_LINE, LINE * took)

    def note_news(self) -> None:
        """Note that something may be ready of which there was nothing."""
        self._empty_until.clear()

    def next_in(self, kind: Kind) -> float:
        """Return in how many seconds to look for this kind; 0: now."""
        return max(
            0.0, self._empty_until.get(kind, 0.0) - self._clock(), self._dear_until.get(kind, 0.0) - self._clock()
        )

    def next_change_in(self) -> float:
        """Return in how many seconds to look for a kind that is left out now; infinite: none is."""
        return min((seconds for kind in (SYNC, ASYNC) if (seconds := self.next_in(kind)) > 0), default=math.inf)
