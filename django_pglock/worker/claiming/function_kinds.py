"""Claiming sync and async functions separately, while only one of the two kinds has room.

The index of ready tasks knows queues and priorities, but not functions. A claim for one kind therefore reads past all
tasks of the other kind that come first. For threads this claim is never postponed, because an idle thread is the worst
case. For the event loop it pauses after each claim, so that such claims never keep the threads waiting for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

#: The functions that a claim is for: those that need a thread, those that need a place of the event loop, or all.
FunctionKind = Literal["sync", "async", "both"]
SYNC: FunctionKind = "sync"
ASYNC: FunctionKind = "async"
BOTH: FunctionKind = "both"

#: Seconds until the next claim for a kind of which nothing was found, unless there is news.
EMPTY_PAUSE = 0.05
#: The pause after a claim for async functions alone, as a multiple of the time that the claim took: the first factor if
#: tasks were found, else the second, because then the claim has read the whole backlog of the others. The third number
#: is the longest pause in seconds.
ASYNC_PAUSE_FACTOR, EMPTY_PAUSE_FACTOR, LONGEST_ASYNC_PAUSE = 4, 50, 30.0


class KindPauses:
    """When to claim again for one kind of functions alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._empty_until: dict[FunctionKind, float] = {}
        self._async_until = 0.0

    def note(self, kind: FunctionKind, *, took: float, found: int) -> None:
        """Note a claim for this kind, how many seconds it took and how many tasks it found."""
        if not found:
            self._empty_until[kind] = self._clock() + EMPTY_PAUSE
        if kind == ASYNC:
            pause = (ASYNC_PAUSE_FACTOR if found else EMPTY_PAUSE_FACTOR) * took
            self._async_until = self._clock() + max(ASYNC_PAUSE_FACTOR * took, min(LONGEST_ASYNC_PAUSE, pause))

    def note_new_tasks(self) -> None:
        """Note that a kind of which nothing was found may be ready now."""
        self._empty_until.clear()

    def next_in(self, kind: FunctionKind) -> float:
        """Return in how many seconds to claim for this kind; 0: now."""
        until = max(self._empty_until.get(kind, 0.0), self._async_until if kind == ASYNC else 0.0)
        return max(0.0, until - self._clock())
