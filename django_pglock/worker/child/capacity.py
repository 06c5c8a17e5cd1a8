"""The capacity of a process: its threads for sync functions, and the slots of its event loop for async functions.

Threads and coroutines are counted separately, so that slow coroutines do not leave a thread idle, and long functions do
not leave the loop idle. Each thread notes in its own ``Slot`` when it begins and ends a claim, and then calls
``changed``. So the slot of a thread says whether the thread is free. No counter that several threads write is needed.
Claims that have ended do not use capacity, also before the settler has written their outcomes.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import TypeAlias

from django_pglock.tasks.claim import Claim

#: Seconds for which a claim may wait for a thread of this process. With a longer wait, tasks would wait here while
#: another worker is idle. With a shorter one, threads would wait for the next answer of the database.
PREFETCH_TIME = 0.025
#: The largest number of tasks that wait in the process, and that one statement claims: while one half runs, the other
#: half is claimed. Two thousand no-op tasks are 20 ms of work.
MOST_PREFETCHED, MOST_AT_ONCE = 2000, 1000
#: The costs of two long tasks are added only if at most this number of short tasks end between them.
LONG_TASKS_WITHIN = 64
#: The largest number of coroutines that run at once, in addition to the threads.
MOST_ASYNC = 100


#: Claims that wait for a thread. A thread that takes None from it must end.
Inbox: TypeAlias = "SimpleQueue[Claim | None]"


class Slot:
    """One thread of the executor. Only that thread writes it; all threads read it."""

    __slots__ = ("began_at", "begun", "ended")

    def __init__(self) -> None:
        #: When its present claim began, by ``time.monotonic()``; None: the thread is free.
        self.began_at: float | None = None
        #: How many claims have begun, and how many have ended, in this thread.
        self.begun = self.ended = 0


class ThreadCapacity:
    """The threads that run sync functions, the claims that wait for them, and how many more claims they need soon.

    A thread calls ``changed`` when it needs work, or when it has begun a claim whose end can now be estimated.
    """

    def __init__(self, count: int, changed: Callable[[], None]) -> None:
        self.slots = [Slot() for _ in range(count)]
        self.inbox: Inbox = SimpleQueue()
        self._changed = changed
        # How many claims were put into the inbox, and how many were taken back before they began.
        self._put = self._taken_back = 0
        # For each call of put() that has claims in the inbox: how many claims had been put after it, and when.
        self._put_at: deque[tuple[int, float]] = deque()
        self._cost: float | None = None
        self._prefetch_limit = 0
        # The seconds that long tasks have taken lately while short tasks were expected, and how many tasks had ended at
        # the last long one. Approximate, because several threads write them.
        self._long, self._long_at = 0.0, 0
        # If at least this number of tasks wait, there are several for each thread.
        self._plenty = 2 * count
        # The cost in seconds below which ``MOST_PREFETCHED`` tasks may wait.
        self._short = count * PREFETCH_TIME / MOST_PREFETCHED

    # Called by the threads

    def next(self, slot: Slot, wait: Callable[[Inbox], Claim | None] = SimpleQueue.get) -> Claim | None:
        """Wait for the next claim of this thread and return it. None: the thread must end.

        ``wait`` takes the claim out of the inbox as soon as there is one.
        """
        claim = wait(self.inbox)
        slot.began_at = time.monotonic()
        slot.begun += 1
        if self._prefetch_limit < self._plenty:
            # So that the fetcher can claim the next task shortly before this one is expected to end.
            self._changed()
        return claim

    def free(self, slot: Slot, cost: float | None = None) -> None:
        """Note that this thread has ended its claim. ``cost``: its seconds; None: it does not change the estimate."""
        if cost is not None and (cost >= self._short or self._prefetch_limit < MOST_PREFETCHED) and self._counts(cost):
            # Otherwise the estimate has no effect, because ``MOST_PREFETCHED`` tasks may wait in any case.
            self._note_cost(cost)
        slot.ended += 1
        slot.began_at = None
        # Only after the slot is free, so that the fetcher sees it.
        if self.inbox.qsize() * 2 <= self._prefetch_limit:
            self._changed()

    # Called by the fetcher

    def put(self, claims: Sequence[Claim]) -> None:
        """Put claims into the inbox. Threads begin them in this order."""
        # First the counter. Otherwise a thread could have begun a claim that is not counted as put.
        self._put += len(claims)
        self._put_at.append((self._put, time.monotonic()))
        put = self.inbox.put
        for claim in claims:
            put(claim)

    def take_back(self) -> Iterator[Claim]:
        """Take the claims that no thread has begun out of the inbox, and yield them."""
        for claim in _taken_from(self.inbox):
            self._taken_back += 1
            yield claim

    @property
    def waiting(self) -> int:
        """How many claims wait for a thread. A claim counts until the thread that has taken it counts as busy."""
        return max(0, self._put - self._taken)

    @property
    def _taken(self) -> int:
        """How many claims have left the inbox."""
        return self._taken_back + sum(slot.begun for slot in self.slots)

    @property
    def ended(self) -> int:
        """How many claims have ended, in all threads together."""
        return sum(slot.ended for slot in self.slots)

    @property
    def running(self) -> int:
        """How many threads run a claim now."""
        return sum(slot.began_at is not None for slot in self.slots)

    def longest_wait(self) -> float:
        """Return for how many seconds the first waiting claim has waited. 0.0: none waits."""
        taken = self._taken
        while self._put_at and self._put_at[0][0] <= taken:
            self._put_at.popleft()
        return time.monotonic() - self._put_at[0][1] if self._put_at else 0.0

    def expected_wait(self) -> float:
        """Return in how many seconds the threads are expected to have begun all waiting claims."""
        return self.waiting * (self._cost or 0.0) / len(self.slots)

    def free_capacity(self) -> int:
        """Return how many claims to fetch now. It is not 0 while a thread is free and no claim waits for it."""
        waiting = self.waiting
        free = len(self.slots) - self.running
        wanted = free + self._prefetch_limit if self._prefetch_limit >= self._plenty else self._soon_free()
        if waiting >= free and waiting * 2 > wanted:
            # To claim a few tasks takes about as long as to claim many, so wait until many are needed.
            return 0
        return max(0, min(MOST_AT_ONCE, wanted - waiting))

    def next_change_in(self, since: float) -> float:
        """Return the seconds until ``_soon_free`` is expected to be larger than at ``since``.

        ``since`` is a moment of ``time.monotonic()``. Infinite: that is not expected, but a thread may call
        ``changed``.
        """
        cost = self._cost
        if cost is None:
            return math.inf
        moments = [began + cost - PREFETCH_TIME for slot in self.slots if (began := slot.began_at) is not None]
        soonest = min((moment for moment in moments if moment > since), default=math.inf)
        return max(0.0, soonest - time.monotonic())

    def expect_cost(self, cost: float) -> None:
        """Set the expected cost of a claim in seconds. Quicker claims lower it again."""
        self._cost = cost
        self._prefetch_limit = int(min(MOST_PREFETCHED, len(self.slots) * PREFETCH_TIME / max(cost, 1e-6)))

    def _soon_free(self) -> int:
        """Return how many claims the threads are expected to begin within ``PREFETCH_TIME`` seconds."""
        cost, now, count = self._cost, time.monotonic(), 0
        for slot in self.slots:
            began = slot.began_at
            if began is None:
                count += 1
            elif cost is not None:
                left = began + cost - now
                # A claim that takes much longer than expected may take any time. Its thread calls ``changed`` at its
                # end.
                if -PREFETCH_TIME < left <= PREFETCH_TIME:
                    count += 1 + int((PREFETCH_TIME - max(0.0, left)) / cost)
        return count

    def _counts(self, cost: float) -> bool:
        """Return whether a cost should change the estimate.

        A short task may take some milliseconds because its thread had to wait for the GIL or for a processor. One such
        task delays no other task for long. So its cost counts only if such tasks together have occupied the threads for
        ``PREFETCH_TIME`` seconds. Otherwise the next claims would often be too small or too late.
        """
        if self._prefetch_limit < MOST_PREFETCHED or cost > PREFETCH_TIME:
            return True
        ended = self.ended
        self._long = cost + (self._long if ended - self._long_at <= LONG_TASKS_WITHIN else 0.0)
        self._long_at = ended
        return self._long > PREFETCH_TIME * len(self.slots)

    def _note_cost(self, cost: float) -> None:
        known = self._cost
        # The estimate rises fast and falls slowly: if it is too low, long tasks wait here while other workers are idle.
        # If it is too high, only this process waits for short tasks.
        self.expect_cost(cost if known is None else known + (cost - known) * (0.3 if cost > known else 0.03))


class LoopCapacity:
    """The slots of the event loop, and the claims that wait for the thread that starts coroutines there."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.inbox: Inbox = SimpleQueue()
        self._changed = changed
        #: Called when the first claim is put into the inbox.
        self.on_first: Callable[[], None] | None = None
        self._count = 0
        self._counting = threading.Condition()
        #: How many claims have ended, including those that were given back.
        self.ended = 0

    @property
    def running(self) -> int:
        """How many claims use a slot. A claim uses it from the moment at which it was fetched."""
        return self._count

    def put(self, claim: Claim) -> None:
        """Put a claim into the inbox."""
        with self._counting:
            self._count += 1
        self.inbox.put(claim)
        if self.on_first is not None:
            start, self.on_first = self.on_first, None
            start()

    def next(self, wait: Callable[[Inbox], Claim | None] = SimpleQueue.get) -> Claim | None:
        """Wait for the next claim and return it. None: the thread that starts coroutines must end."""
        return wait(self.inbox)

    def take_back(self) -> Iterator[Claim]:
        """Take the claims that have not begun out of the inbox, and yield them."""
        for claim in _taken_from(self.inbox):
            self.free()
            yield claim

    def free(self) -> None:
        """Note that one claim has ended."""
        with self._counting:
            self._count -= 1
            self.ended += 1
            self._counting.notify_all()
        self._changed()

    def free_capacity(self) -> int:
        """Return how many claims to fetch now."""
        return max(0, MOST_ASYNC - self._count)

    def wait(self, timeout: float, *, besides: int = 0) -> bool:
        """Wait up to ``timeout`` seconds until no claim uses a slot, or only ``besides``. Return whether this is so."""
        with self._counting:
            return self._counting.wait_for(lambda: self._count <= besides, timeout)


def _taken_from(inbox: Inbox) -> Iterator[Claim]:
    while True:
        try:
            claim = inbox.get_nowait()
        except Empty:
            return
        if claim is not None:
            yield claim
