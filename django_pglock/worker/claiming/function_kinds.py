"""Claiming sync and async functions apart, while only one of the two has room.

The index of what is ready knows queues and priorities, and nothing of functions. A claim for one kind reads past
everything of the other kind that comes first. For threads that is never put off: an idle thread is the worst. For the
event loop it rests after each look, so that such looks never keep the threads waiting for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

#: Which functions a claim is for: those that need a thread, those that need a place of the event loop, or all.
Kind = Literal["sync", "async", "both"]
SYNC: Kind = "sync"
ASYNC: Kind = "async"
BOTH: Kind = "both"

#: Seconds until the next look for a kind of which there was nothing, unless there is news.
PAUSE = 0.05
#: After a look for the event loop alone, the next one comes after so many times as long as it took.
REST = 4


class Looks:
    """When to look again for tasks of one kind alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._empty_until: dict[Kind, float] = {}
        self._rests_until = 0.0

    def note(self, kind: Kind, *, took: float, found: int) -> None:
        """Note a look for this kind, how many seconds it took and how many tasks it found."""
        if not found:
            self._empty_until[kind] = self._clock() + PAUSE
        if kind == ASYNC:
            self._rests_until = self._clock() + REST * took

    def note_news(self) -> None:
        """Note that something may be ready of which there was nothing."""
        self._empty_until.clear()

    def next_in(self, kind: Kind) -> float:
        """Return in how many seconds to look for this kind; 0: now."""
        until = max(self._empty_until.get(kind, 0.0), self._rests_until if kind == ASYNC else 0.0)
        return max(0.0, until - self._clock())
