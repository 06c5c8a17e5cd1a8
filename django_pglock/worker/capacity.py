"""What a process can run: its threads for sync functions, the places of its event loop for async ones.

The two are counted apart, so that slow coroutines never keep a thread idle, nor long functions the loop. Whether a
thread is free is a fact and not a difference between counters of other threads: each thread notes in its own ``Slot``
when it has begun and when it has ended, and then says so. What the settler has not written yet plays no part.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

from django_pglock.tasks.claim import Claim

#: Seconds for which a claim may wait for its thread in this process. More would keep from an idle worker elsewhere what
#: it could start at once; less would leave threads waiting for the next answer of the database.
AHEAD = 0.025
#: Tasks that wait in the process at most, and that one claim takes: while one half is run, the other is claimed. Two
#: thousand no-op tasks are 20 ms of work.
MOST_AHEAD, MOST_AT_ONCE = 2000, 1000
#: Coroutines that may be under way at once, besides the threads.
MOST_ASYNC = 100


class Slot:
    """One thread of the executor. Written by that thread alone, read by all."""

    __slots__ = ("began_at", "begun", "ended")

    def __init__(self) -> None:
        #: The moment, of ``time.monotonic()``, at which its present claim has begun; None: it is free.
        self.began_at: float | None = None
        #: How many claims have begun here, and ended.
        self.begun = self.ended = 0


class ThreadCapacity:
    """The threads that run sync functions, what waits for them, and how much more they can use soon.

    ``changed`` is called by a thread that needs something, or that is to be reckoned with anew.
    """

    def __init__(self, count: int, changed: Callable[[], None]) -> None:
        self.slots = [Slot() for _ in range(count)]
        self.inbox: SimpleQueue[Claim | None] = SimpleQueue()
        self._changed = changed
        # How many claims were put into the inbox, and taken out again before they had begun.
        self._put = self._taken_back = 0
        self._cost: float | None = None
        self._ahead = 0
        # Seconds that a task may cost so that the most may wait that ever do.
        self._short = count * AHEAD / MOST_AHEAD

    # Called by the threads

    def next(self, slot: Slot) -> Claim | None:
        """Wait for the next claim of this thread and return it; None: the thread is to end."""
        claim = self.inbox.get()
        slot.began_at = time.monotonic()
        slot.begun += 1
        if not self._is_plenty():
            # The fetcher claims the next one shortly before this one is expected to end.
            self._changed()
        return claim

    def free(self, slot: Slot, *, cost: float | None = None) -> None:
        """Note that this thread has ended its claim; ``cost``: the seconds that took, if that says something."""
        if cost is not None:
            self._note_cost(cost)
        slot.ended += 1
        slot.began_at = None
        # After the slot is free: whoever looks now sees it.
        if self.inbox.qsize() * 2 <= self._ahead:
            self._changed()

    # Called by the fetcher

    def put(self, claim: Claim) -> None:
        """Have a claim begun."""
        self._put += 1
        self.inbox.put(claim)

    def take_back(self) -> Iterator[Claim]:
        """Yield what no thread has begun, and begin it no more."""
        for claim in _taken_from(self.inbox):
            self._taken_back += 1
            yield claim

    @property
    def waiting(self) -> int:
        """How many claims wait for a thread. One that a thread has taken waits until the thread counts as busy."""
        return max(0, self._put - self._taken_back - sum(slot.begun for slot in self.slots))

    @property
    def ended(self) -> int:
        """How many claims have ended in all threads."""
        return sum(slot.ended for slot in self.slots)

    @property
    def running(self) -> int:
        """How many threads have begun something and not ended it."""
        return sum(slot.began_at is not None for slot in self.slots)

    def room(self) -> int:
        """Return how many claims to fetch now. Never 0 while a thread is free for which nothing waits."""
        waiting = self.waiting
        free = len(self.slots) - self.running
        wanted = free + self._ahead if self._is_plenty() else self._soon_free()
        if waiting >= free and waiting * 2 > wanted:
            # A claim takes about as long for a few as for many.
            return 0
        return max(0, min(MOST_AT_ONCE, wanted - waiting))

    def next_change_in(self, since: float) -> float:
        """Return in how many seconds one more thread is expected to be free soon than at ``since``, a monotonic moment.

        Infinite: none is, before one says that it is free.
        """
        cost = self._cost
        if cost is None:
            return math.inf
        moments = [began + cost - AHEAD for slot in self.slots if (began := slot.began_at) is not None]
        soonest = min((moment for moment in moments if moment > since), default=math.inf)
        return max(0.0, soonest - time.monotonic())

    def expect_cost(self, cost: float) -> None:
        """Expect claims to cost this many seconds, until they prove to be quicker."""
        self._cost = cost
        self._ahead = int(min(MOST_AHEAD, len(self.slots) * AHEAD / max(cost, 1e-6)))

    def _is_plenty(self) -> bool:
        """Say whether tasks are so short that several wait for each thread."""
        return self._ahead >= 2 * len(self.slots)

    def _soon_free(self) -> int:
        """Return how many claims the threads are expected to begin within ``AHEAD`` seconds."""
        cost, now, count = self._cost, time.monotonic(), 0
        for slot in self.slots:
            began = slot.began_at
            if began is None:
                count += 1
            elif cost is not None:
                left = began + cost - now
                # One that takes much longer than expected may take any time: it will say when it is free.
                if -AHEAD < left <= AHEAD:
                    count += 1 + int((AHEAD - max(0.0, left)) / cost)
        return count

    def _note_cost(self, cost: float) -> None:
        known = self._cost
        if known is not None and known < self._short and cost < self._short:
            # As many as may wait do so in any case.
            return
        # Follows upwards fast and downwards slowly: to hoard long tasks is worse than to wait for short ones.
        self.expect_cost(cost if known is None else known + (cost - known) * (0.3 if cost > known else 0.03))


class LoopCapacity:
    """The places of the event loop, and what waits for the thread that starts coroutines there."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.inbox: SimpleQueue[Claim | None] = SimpleQueue()
        self._changed = changed
        self._count = 0
        self._counting = threading.Condition()
        #: How many claims were over, given back ones included.
        self.ended = 0

    @property
    def running(self) -> int:
        """How many claims are under way, from the moment they were fetched."""
        return self._count

    def put(self, claim: Claim) -> None:
        """Have a claim begun."""
        with self._counting:
            self._count += 1
        self.inbox.put(claim)

    def next(self) -> Claim | None:
        """Wait for the next claim and return it; None: who starts coroutines is to end."""
        return self.inbox.get()

    def take_back(self) -> Iterator[Claim]:
        """Yield what has not been begun, and begin it no more."""
        for claim in _taken_from(self.inbox):
            self.free()
            yield claim

    def free(self) -> None:
        """Note that one of them is over."""
        with self._counting:
            self._count -= 1
            self.ended += 1
            self._counting.notify_all()
        self._changed()

    def room(self) -> int:
        """Return how many claims to fetch now."""
        return max(0, MOST_ASYNC - self._count)

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until nothing is under way, and say whether that came."""
        with self._counting:
            return self._counting.wait_for(lambda: self._count <= 0, timeout)


def _taken_from(inbox: SimpleQueue[Claim | None]) -> Iterator[Claim]:
    while True:
        try:
            claim = inbox.get_nowait()
        except Empty:
            return
        if claim is not None:
            yield claim
