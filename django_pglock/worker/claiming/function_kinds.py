"""Claims of one kind of functions, sync or async, while only this kind has capacity.

The index of ready tasks has queues and priorities, but not functions. So a claim for one kind reads and skips all tasks
of the other kind that come first. For threads such a claim is not postponed, because idle threads are worse. For the
event loop there is a pause after each claim, so that these claims do not delay the threads for long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

#: The functions that a claim is for: those that need a thread, those that need a slot of the event loop, or all.
FunctionKind = Literal["sync", "async", "both"]
SYNC: FunctionKind = "sync"
ASYNC: FunctionKind = "async"
BOTH: FunctionKind = "both"

#: Seconds from a claim for one kind that found nothing to the next one, unless new tasks may be ready.
EMPTY_PAUSE = 0.05
#: The pause after a claim for only async functions, as a multiple of the time that the claim took. The first factor is
#: used if tasks were found. Otherwise the second, because the claim has read the whole backlog of sync functions. The
#: third number is the longest pause in seconds.
ASYNC_PAUSE_FACTOR, EMPTY_PAUSE_FACTOR, LONGEST_ASYNC_PAUSE = 4, 50, 30.0


class KindPauses:
    """The pauses between claims for only one kind of functions."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._empty_until: dict[FunctionKind, float] = {}
        self._async_until = 0.0

    def note(self, kind: FunctionKind, *, took: float, found: int) -> None:
        """Note a claim for this kind: the seconds that it took, and the number of tasks that it found."""
        # A poll may claim twice: first from the queues that had ready tasks before, and then from the others.
        self._empty_until[kind] = self._clock() + (0 if found else EMPTY_PAUSE)
        if kind == ASYNC:
            pause = (ASYNC_PAUSE_FACTOR if found else EMPTY_PAUSE_FACTOR) * took
            self._async_until = self._clock() + max(ASYNC_PAUSE_FACTOR * took, min(LONGEST_ASYNC_PAUSE, pause))

    def note_new_tasks(self) -> None:
        """Note that tasks may be ready now of a kind for which the last claim found nothing."""
        self._empty_until.clear()

    def next_in(self, kind: FunctionKind) -> float:
        """Return the seconds until the next claim for this kind; 0: now."""
        until = max(self._empty_until.get(kind, 0.0), self._async_until if kind == ASYNC else 0.0)
        return max(0.0, until - self._clock())
