"""The claims in flight in this process: those that wait for a thread, run, or wait to be settled.

The fetcher adds claims to the inboxes. Executor threads take them out, and put ended claims into the outbox. The
settler takes ended claims from the outbox and removes them. Python's SimpleQueue and dict are thread-safe.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from django_pglock.store.outcome import Abandoned, GivenBack, Outcome
from django_pglock.store.requests_to_worker import write_progress
from django_pglock.tasks import registry
from django_pglock.tasks.claim import Claim
from django_pglock.worker.child.capacity import LoopCapacity, ThreadCapacity

if TYPE_CHECKING:
    from django_pglock.tasks.compat import TaskResult

#: The number of outcomes that may wait for the database: two batches of the settler. While more outcomes wait, the
#: process claims nothing.
MOST_UNSETTLED = 3000
#: Seconds, at most, for which a thread pauses after it had to give back a task. The pauses begin with one second, and
#: double with this number of claims, which several threads give back at about the same time.
LONGEST_UNABLE_PAUSE, UNABLE_AT_ONCE = 8.0, 8


class InFlight:
    """The claims of this process, and how many more it should claim."""

    def __init__(self, threads: int, *, most: int | None = None) -> None:
        #: How many more tasks the process may claim, if that is limited. Tasks that a group call adds do not count.
        self.claims_left = most
        #: Set when the fetcher should poll again: a thread needs work, new tasks may be ready, or the worker stops.
        self.fetcher_wakeup = threading.Event()
        #: Whether tasks may be ready that were not ready at the last poll. Set before ``fetcher_wakeup``.
        self.has_new_tasks = False
        self.threads = ThreadCapacity(threads, self.wake_fetcher)
        self.coroutines = LoopCapacity(self.wake_fetcher)
        self.outbox: SimpleQueue[EndedClaim | None] = SimpleQueue()
        # By id and attempt: a task that was given back may be claimed again before its old claim is removed.
        self.claims: dict[tuple[int, int], Claim] = {}
        #: The lock keys of the groups for which threads are claiming now, by the claim that leads the group.
        self.claiming_groups: dict[Claim, str | None] = {}
        #: How many ended claims the settler has taken and not yet written. Only the settler sets it.
        self.settling = 0
        #: How many tasks were claimed since the start. Protected by a lock, because threads claim for their groups,
        #: too.
        self.claimed = 0
        self._counting = threading.Lock()
        #: How many claims in a row could not begin in this process, and when the first of them ended.
        self._unable, self._unable_since = 0, math.inf
        #: When the answer to a claim was lost, by time.monotonic(). Rows may then belong to this worker without a claim
        #: here, now or soon.
        self.answer_lost_at = -math.inf
        # Whether nothing was claimed because too many outcomes wait for the database. The settler must wake the
        # fetcher.
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

    @property
    def has_ended_any(self) -> bool:
        """Whether the process has run any task to its end."""
        return bool(self.threads.ended or self.coroutines.ended)

    @property
    def unable_for(self) -> float:
        """For how many seconds the process has begun no task although it tried."""
        return max(0.0, time.monotonic() - self._unable_since) if self._unable > 1 else 0.0

    def note_unable(self) -> float:
        """Note that a claim could not begin in this process. Return for how many seconds its thread should pause.

        The tasks themselves are not delayed, because another process may be able to run them.
        """
        self._unable += 1
        self._unable_since = min(self._unable_since, time.monotonic())
        return float(min(LONGEST_UNABLE_PAUSE, 2 ** (self._unable // UNABLE_AT_ONCE)))

    def note_able(self) -> None:
        """Note that a claim has begun in this process."""
        if self._unable:
            self._unable, self._unable_since = 0, math.inf

    def may_claim(self) -> bool:
        """Return whether the process may claim tasks now, regardless of free threads."""
        if self.unsettled <= MOST_UNSETTLED:
            return True
        # Set before the number is read again, because the settler lowers the number and then reads whether to wake the
        # fetcher.
        self._is_held_back = True
        return self.unsettled <= MOST_UNSETTLED

    def notify_fetcher(self) -> None:
        """Wake the fetcher, because tasks may have become ready."""
        self.has_new_tasks = True
        self.fetcher_wakeup.set()

    def wake_fetcher(self) -> None:
        """Have the fetcher poll again."""
        if not self.fetcher_wakeup.is_set():
            self.fetcher_wakeup.set()

    def task_ids(self) -> list[int]:
        """Return the ids of the tasks in flight."""
        return [task_id for task_id, _attempt in list(self.claims)]

    def group_keys_being_claimed(self) -> list[str]:
        """Return the lock keys of the groups for which threads are claiming now."""
        return [key for key in list(self.claiming_groups.values()) if key is not None]

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
        with self._counting:
            self.claimed += len(claims)

    def end(self, ended: EndedClaim) -> None:
        """Pass an ended claim, and the other claims of its group call, to the settler."""
        self.outbox.put(ended)
        for other in ended.same_call:
            self.outbox.put(other)

    def remove(self, ended_claims: Sequence[EndedClaim]) -> None:
        """Remove claims that were settled or lost."""
        for key in map(attrgetter("id", "attempt"), map(attrgetter("claim"), ended_claims)):
            self.claims.pop(key, None)
        if self._is_held_back:
            self._is_held_back = False
            self.wake_fetcher()

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

    def abandon(self, claims: Sequence[Claim], delay: float) -> None:
        """Abandon claims: their tasks run again in ``delay`` seconds, and later outcomes of them are dropped."""
        for claim in claims:
            self.outbox.put(EndedClaim(claim, Abandoned(delay)))


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


MEBIBYTE = 2**20


class Limits:
    """The limits of one process: ``max_memory`` in MiB. ``InFlight`` counts the tasks."""

    def __init__(self, in_flight: InFlight, *, max_memory: float | None) -> None:
        self.in_flight = in_flight
        self.max_memory = max_memory

    def reached(self) -> str:
        """Return in words which limit is reached; empty: none."""
        if self.in_flight.claims_left == 0 and not self.in_flight.claims:
            return "it has run its maximum number of tasks"
        # Only after one task. If the limit is below the memory of the project itself, the worker still runs some tasks.
        if (
            self.max_memory is not None
            and self.in_flight.has_ended_any
            and resident_memory() > self.max_memory * MEBIBYTE
        ):
            return f"it uses {resident_memory() / MEBIBYTE:.0f} MiB of memory"
        return ""


def resident_memory() -> int:
    """Return how many bytes of memory the process uses now or, on systems that do not report this, at its peak."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


class Progress:
    """Writes the newest progress of each task in flight.

    The settler writes it from time to time, and once more before the end of the task. In the session of an atomic task,
    the progress would be visible only after the commit.
    """

    def __init__(self, in_flight: InFlight, using: str) -> None:
        self.in_flight = in_flight
        self.using = using

    @property
    def is_new(self) -> bool:
        """Whether a task in flight has reported progress that is not written yet."""
        return any(claim.progress is not claim.written_progress for claim in list(self.in_flight.claims.values()))

    def write(self, claims: Iterable[Claim] | None = None) -> list[Claim]:
        """Write the new progress of claims (None: of all in flight). Return those with a lost or locked row."""
        claims = list(self.in_flight.claims.values()) if claims is None else claims
        changed = [claim for claim in claims if claim.progress is not claim.written_progress]
        if changed:
            write_progress(self.using, changed)
        return [claim for claim in changed if claim.progress is not claim.written_progress]
