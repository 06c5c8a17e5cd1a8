"""What a process has claimed, and how much more it needs: claims that wait for a thread, run, or wait to be settled.

The feeder adds claims to the inboxes. Executor threads take them out, and put ended claims into the outbox. The
settler takes ended claims from the outbox and removes them. Python's SimpleQueue, deque and dict are thread-safe.

Threads and coroutines are counted separately, so that slow coroutines do not leave a thread idle, and long functions do
not leave the loop idle. Each thread notes in its own ``Slot`` when it begins and ends a claim, and then calls
``changed``. So the slot of a thread says whether the thread is free. No counter that several threads write is needed.
Claims that have ended do not use capacity, also before the settler has written their outcomes.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

from django_pglock.store.outcome import Abandoned, GivenBack, Outcome
from django_pglock.store.requests_to_worker import write_progress
from django_pglock.tasks import registry
from django_pglock.tasks.claim import Claim
from django_pglock.worker.queues import Queues

if TYPE_CHECKING:
    from django_pglock.tasks.compat import TaskResult

#: Seconds of work, by the mean duration of the last tasks, that may wait for the threads. With more, tasks would wait
#: here while another worker is idle. With less, threads would wait for the next answer of the database.
PREFETCH_TIME = 0.025
#: The largest number of tasks that wait in the process, and that one statement claims: while one half runs, the other
#: half is claimed. Two thousand no-op tasks are 20 ms of work.
MOST_PREFETCHED, MOST_AT_ONCE = 2000, 1000
#: The weight of one task in the mean duration. With it, one long task ends the prefetch after many short ones, and one
#: short task that had to wait for a processor does not.
WEIGHT = 0.1
#: Seconds after which claims that no thread has begun are given back if they are not expected to begin soon.
LONGEST_WAIT = 0.2
#: The largest number of coroutines that run at once, in addition to the threads.
MOST_ASYNC = 100
#: The number of outcomes that may wait for the database: two batches of the settler. While more outcomes wait, the
#: process claims nothing.
MOST_UNSETTLED = 3000
#: Seconds, at most, for which a thread pauses after it had to give back a task.
LONGEST_UNABLE_PAUSE = 8.0

#: Claims that wait for a thread. A thread that takes None from it must end.
Inbox: TypeAlias = "SimpleQueue[Claim | None]"


@dataclass(slots=True, eq=False)
class Slot:
    """One thread of the executor. Only that thread writes it; all threads read it."""

    #: When its present claim began, by ``time.monotonic()``; None: the thread is free.
    began_at: float | None = None
    #: How many claims have begun in this thread.
    begun: int = 0


class ThreadCapacity:
    """The threads that run sync functions, the claims that wait for them, and how many more claims they need soon.

    A thread calls ``changed`` when it needs work soon.
    """

    def __init__(self, count: int, changed: Callable[[], None]) -> None:
        self.slots = [Slot() for _ in range(count)]
        self.inbox: Inbox = SimpleQueue()
        self._changed = changed
        # How many claims were put into the inbox, without those that were taken back before they began.
        self._put = 0
        # A moment, and how many claims had been put by then. It moves on when all of these have begun.
        self._marked_at, self._put_before = 0.0, 0
        #: The mean duration of the last tasks in seconds, written by all threads; None: no task has ended.
        self.cost: float | None = None
        # A thread that becomes free wakes the feeder if at most this number of claims wait. Not less than the number of
        # threads, because several may become free at once.
        self._few = count

    # Called by the threads

    def next(self, slot: Slot, wait: Callable[[Inbox], Claim | None] = SimpleQueue.get) -> Claim | None:
        """Wait for the next claim of this thread and return it. None: the thread must end.

        ``wait`` takes the claim out of the inbox as soon as there is one.
        """
        claim = wait(self.inbox)
        slot.began_at = time.monotonic()
        slot.begun += 1
        return claim

    def free(self, slot: Slot, cost: float | None = None) -> None:
        """Note that this thread has ended its claim. ``cost``: its seconds; None: it does not change the mean."""
        if cost is not None:
            mean = self.cost
            self.cost = cost if mean is None else mean + (cost - mean) * WEIGHT
        slot.began_at = None
        # Only after the slot is free, so that the feeder sees it.
        if self.inbox.qsize() <= self._few:
            self._changed()

    # Called by the feeder

    def put(self, claims: Sequence[Claim]) -> None:
        """Put claims into the inbox. Threads begin them in this order."""
        # First the counter. Otherwise a thread could have begun a claim that is not counted as put.
        self._put += len(claims)
        put = self.inbox.put
        for claim in claims:
            put(claim)

    def take_back(self) -> Iterator[Claim]:
        """Take the claims that no thread has begun out of the inbox, and yield them."""
        for claim in _taken_from(self.inbox):
            self._put -= 1
            yield claim

    @property
    def waiting(self) -> int:
        """How many claims wait for a thread. A claim counts until the thread that has taken it counts as busy."""
        return max(0, self._put - self._begun)

    @property
    def _begun(self) -> int:
        return sum([slot.begun for slot in self.slots])

    @property
    def running(self) -> int:
        """How many threads run a claim now."""
        return sum([slot.began_at is not None for slot in self.slots])

    def free_capacity(self) -> int:
        """Return how many claims to fetch now. It is not 0 while a thread is free and no claim waits for it."""
        count, cost = len(self.slots), self.cost
        prefetch_limit = 0 if cost is None else round(min(MOST_PREFETCHED, count * PREFETCH_TIME / max(cost, 1e-6)))
        self._few = max(count, prefetch_limit // 2)
        waiting, free = self.waiting, count - self.running
        wanted = free + prefetch_limit
        if waiting >= free and waiting * 2 > wanted:
            # To claim a few tasks takes about as long as to claim many, so wait until many are needed.
            return 0
        return max(0, min(MOST_AT_ONCE, wanted - waiting))

    def are_late(self) -> bool:
        """Return whether claims have waited for ``LONGEST_WAIT`` seconds, and are not expected to begin soon."""
        now = time.monotonic()
        if self._begun >= min(self._put_before, self._put):
            self._marked_at, self._put_before = now, self._put
        if now - self._marked_at < LONGEST_WAIT:
            return False
        if (blocked_for := min(now - (slot.began_at or now) for slot in self.slots)) >= LONGEST_WAIT:
            # Tasks that have run for so long are expected to run for as long again.
            self.cost = 2 * blocked_for
            return True
        # Short tasks may have come before long ones, of which the first have ended.
        return self.waiting * (self.cost or 0.0) / len(self.slots) >= LONGEST_WAIT


class LoopCapacity:
    """The slots of the event loop, and the claims that wait for the thread that starts coroutines there."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.inbox: Inbox = SimpleQueue()
        self._changed = changed
        #: Called when the first claim is put into the inbox.
        self.on_first: Callable[[], None] | None = None
        #: How many claims use a slot, from the moment at which they were fetched.
        self.running = 0
        self._counting = threading.Lock()

    def put(self, claim: Claim) -> None:
        """Put a claim into the inbox."""
        with self._counting:
            self.running += 1
        self.inbox.put(claim)
        if self.on_first is not None:
            start, self.on_first = self.on_first, None
            start()

    def take_back(self) -> Iterator[Claim]:
        """Take the claims that have not begun out of the inbox, and yield them."""
        for claim in _taken_from(self.inbox):
            self.free()
            yield claim

    def free(self) -> None:
        """Note that one claim has ended."""
        with self._counting:
            self.running -= 1
        self._changed()

    def free_capacity(self) -> int:
        """Return how many claims to fetch now."""
        return max(0, MOST_ASYNC - self.running)


def _taken_from(inbox: Inbox) -> Iterator[Claim]:
    while True:
        try:
            claim = inbox.get_nowait()
        except Empty:
            return
        if claim is not None:
            yield claim


class InFlight:
    """The claims of this process, and how many more it should claim."""

    def __init__(
        self,
        threads: int,
        *,
        most: int | None = None,
        queues: Queues | None = None,
        tell_parent: Callable[..., None] = lambda **_: None,
    ) -> None:
        #: The queues that the process serves; None: all.
        self.queues = queues
        #: Sends a message to the parent.
        self.tell_parent = tell_parent
        #: How many more tasks the process may claim, if that is limited. Tasks that a group call adds do not count.
        self.claims_left = most
        #: Set when the feeder should poll again: a thread needs work, new tasks may be ready, or the worker stops.
        self.feeder_wakeup = threading.Event()
        #: What the feeder has not read yet: a queue in which tasks have become ready, and how often workers that could
        #: claim nothing have passed the notification on; None: tasks of any queue may be ready.
        self.news: deque[tuple[str, int] | None] = deque()
        #: Whether a thread or a coroutine that becomes free wakes the feeder.
        self.is_capacity_wanted = True
        self.threads = ThreadCapacity(threads, self.wake_feeder)
        self.coroutines = LoopCapacity(self.wake_feeder)
        self.outbox: SimpleQueue[EndedClaim | None] = SimpleQueue()
        # By id and attempt: a task that was given back may be claimed again before its old claim is removed.
        self.claims: dict[tuple[int, int], Claim] = {}
        #: The lock keys of the groups for which threads are claiming now, by the claim that leads the group.
        self.claiming_groups: dict[Claim, str | None] = {}
        #: How many ended claims the settler has taken and not yet written. Only the settler sets it.
        self.settling = 0
        #: For how many seconds no claim could begin in this process, although it tried; and since when.
        self.unable_for, self._unable_since = 0.0, math.inf
        #: When claims last came or went, or the answer to a claim was lost, by time.monotonic(). For some time after
        #: it, rows may belong to this worker without a claim here.
        self.changed_at = -math.inf
        # Whether nothing was claimed because too many outcomes wait for the database. The settler must wake the feeder.
        self._is_held_back = False

    @property
    def waiting(self) -> int:
        """How many claims no thread or coroutine has begun."""
        return self.threads.waiting + self.coroutines.inbox.qsize()

    @property
    def unsettled(self) -> int:
        """How many ended claims wait for the database. Approximate, because several threads move them meanwhile."""
        return self.outbox.qsize() + self.settling

    @property
    def running(self) -> int:
        """How many tasks run now. Approximate, too."""
        return max(0, len(self.claims) - self.waiting - self.unsettled)

    def pause_after(self, ended: EndedClaim) -> float:
        """Return for how many seconds the runner of a claim should pause: if it could not begin in this process.

        Without a pause, a runner would take and give back tasks faster than others can run them. The tasks themselves
        are not delayed, because another process may be able to run them.
        """
        if not isinstance(ended.outcome, GivenBack) or ended.seconds is not None:
            if self._unable_since < math.inf:
                self.unable_for, self._unable_since = 0.0, math.inf
            return 0.0
        now = time.monotonic()
        self._unable_since = min(self._unable_since, now)
        self.unable_for = now - self._unable_since
        return min(LONGEST_UNABLE_PAUSE, max(1.0, self.unable_for))

    def may_claim(self) -> bool:
        """Return whether the process may claim tasks now, regardless of free threads."""
        if self.unsettled <= MOST_UNSETTLED:
            return True
        # Set before the number is read again, because the settler lowers the number and then reads whether to wake the
        # feeder.
        self._is_held_back = True
        return self.unsettled <= MOST_UNSETTLED

    def notify_feeder(self, queue: str | None = None, hops: int = 0) -> None:
        """Have the feeder poll at once, because tasks of this queue (None: of any queue) may have become ready.

        ``hops``: how often workers that could claim nothing have passed the notification on.
        """
        if queue is not None and self.queues is not None and not self.queues.serves(queue):
            return
        self.news.append(None if queue is None else (queue, hops))
        self.feeder_wakeup.set()

    def wake_feeder(self) -> None:
        """Have the feeder poll again, because there is more capacity, unless it sleeps until tasks become ready."""
        if self.is_capacity_wanted and not self.feeder_wakeup.is_set():
            self.feeder_wakeup.set()

    def task_ids(self) -> list[int]:
        """Return the ids of the tasks in flight."""
        return [task_id for task_id, _attempt in list(self.claims)]

    def begin_all(self, claims: Sequence[Claim]) -> None:
        """Add claims, and pass them to threads and event loop in this order."""
        self.add(claims)
        if self.claims_left is not None:
            self.claims_left -= len(claims)
        self.begin(claims)

    def begin(self, claims: Sequence[Claim]) -> None:
        """Pass claims to the threads or to the event loop, depending on their functions."""
        # By function, because there are few functions, and there may be a thousand claims.
        coroutines = set(filter(registry.is_async, set(map(attrgetter("task_path"), claims))))
        if not coroutines:
            self.threads.put(claims)
            return
        for claim in claims:
            if claim.task_path in coroutines:
                self.coroutines.put(claim)
            else:
                self.threads.put([claim])

    def add(self, claims: Sequence[Claim]) -> None:
        """Add claims without passing them on. The caller runs or ends them."""
        self.claims.update(zip(map(attrgetter("id", "attempt"), claims), claims, strict=True))
        self.changed_at = time.monotonic()

    def end(self, ended: EndedClaim) -> None:
        """Pass an ended claim, and the other claims of its group call, to the settler."""
        self.outbox.put(ended)
        for other in ended.same_call:
            self.outbox.put(other)

    def remove(self, ended_claims: Sequence[EndedClaim]) -> None:
        """Remove claims that were settled or lost."""
        for key in map(attrgetter("id", "attempt"), map(attrgetter("claim"), ended_claims)):
            self.claims.pop(key, None)
        self.changed_at = time.monotonic()
        if self._is_held_back:
            self._is_held_back = False
            self.wake_feeder()

    def give_back_waiting(self) -> int:
        """Give back all claims that have not begun. Returns how many."""
        claims = [*self.threads.take_back(), *self.coroutines.take_back()]
        for claim in claims:
            self.give_back(claim)
        if self.claims_left is not None:
            self.claims_left += len(claims)
        return len(claims)

    def give_back(self, claim: Claim) -> None:
        """Give back a claim that has not begun."""
        self.outbox.put(EndedClaim(claim, GivenBack()))

    def abandon(self, claims: Iterable[Claim], delay: float) -> None:
        """Abandon claims: their tasks run again in ``delay`` seconds, and later outcomes of them are dropped."""
        for claim in claims:
            self.outbox.put(EndedClaim(claim, Abandoned(delay)))

    def limit_reached(self, max_memory: float | None, *, has_ended_any: bool) -> str:
        """Return in words which limit the process has reached; empty: none. ``max_memory`` is in MiB."""
        if self.claims_left == 0 and not self.claims:
            return "it has run its maximum number of tasks"
        # Only after one task. If the limit is below the memory of the project itself, the worker still runs some tasks.
        if max_memory is not None and has_ended_any and (used := resident_memory() / 2**20) > max_memory:
            return f"it uses {used:.0f} MiB of memory"
        return ""


@dataclass(slots=True, eq=False)
class EndedClaim:
    """One claim and its outcome.

    ``outcome`` is None if the task no longer belonged to the claim. ``is_settled``: an atomic task has already written
    the outcome in its own transaction, so the settler only reports it.
    """

    claim: Claim
    outcome: Outcome | None
    #: The result object for signal receivers and logs; None: there is no observer.
    result: TaskResult[..., object] | None = None
    is_settled: bool = False
    #: How many seconds the function ran, if it began.
    seconds: float | None = None
    #: When the task finished, in seconds since the epoch by the database's clock.
    finished_at: float | None = None
    #: The other claims of the same group call, with their outcomes.
    same_call: Sequence[EndedClaim] = ()


def resident_memory() -> int:
    """Return how many bytes of memory the process uses now or, on systems that do not report this, at its peak."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def with_new_progress(claims: Iterable[Claim]) -> list[Claim]:
    """Return the claims whose tasks have reported progress that is not written yet."""
    return [claim for claim in claims if claim.progress is not claim.written_progress]


def write_new_progress(using: str, claims: Iterable[Claim]) -> list[Claim]:
    """Write the newest progress of tasks. Return the claims with a lost or locked row.

    The settler writes it from time to time, and once more before the end of a task. In the session of an atomic task,
    the progress would be visible only after the commit.
    """
    if changed := with_new_progress(claims):
        write_progress(using, changed)
    return with_new_progress(changed)
