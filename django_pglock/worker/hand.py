"""What the process has in hand: claims that wait for a thread, run, or wait to be settled.

The fetcher puts claims in, executor threads take them and put outcomes in, the settler takes those and lets go.
Python's SimpleQueue and dict are safe between threads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from django_pglock.tasks.claim import Claim
from django_pglock.tasks.outcome import Abandoned, Outcome, Released

if TYPE_CHECKING:
    from django_pglock.tasks.compat import TaskResult

#: Seconds of work that may wait in this process beyond what its threads are doing. More would hoard what an idle
#: worker elsewhere could start at once; less would leave threads waiting for the next answer of the database.
AHEAD = 0.025
#: Tasks that wait in the process at most, and that one claim takes: while one half is run, the other is claimed. Two
#: thousand no-op tasks are 20 ms of work.
MOST_AHEAD, MOST_AT_ONCE = 2000, 1000
#: Outcomes that may wait for the database. While more do, nothing new is claimed.
MOST_UNSETTLED = 5000
#: Coroutines that may be under way at once, besides the threads.
MOST_ASYNC = 100


@dataclass(slots=True, eq=False)
class Ending:
    """A claim with what came of it, on its way to the settler.

    ``outcome`` is None when the claim was found lost. ``is_settled``: an atomic task wrote it in its own transaction.
    """

    claim: Claim
    outcome: Outcome | None
    result: TaskResult[..., object] | None = None
    is_settled: bool = False
    finished_at: float | None = None
    #: The endings of the other claims that were run by the same call.
    companions: Sequence[Ending] = ()


class Hand:
    """The claims of this process, and how many more it should ask for."""

    def __init__(self, threads: int, *, most: int | None = None) -> None:
        self.threads = threads
        #: How many more tasks the process may claim, if that is limited; what a group takes along is not counted.
        self.left = most
        self.inbox: SimpleQueue[Claim | None] = SimpleQueue()
        self.outbox: SimpleQueue[Ending | None] = SimpleQueue()
        # By id and attempt: a task that was given back may be claimed again before its old claim is let go.
        self.claims: dict[tuple[int, int], Claim] = {}
        #: Lock keys for whose groups threads are claiming, by the claims that run already.
        self.gathering: dict[Claim, str | None] = {}
        #: Set when the fetcher should look again: a thread is short of work, a notification came, or the end.
        self.hungry = threading.Event()
        #: Endings that the settler has taken and not yet written. Only the settler sets it.
        self.settling = 0
        self.running_async = 0
        self.done = 0
        #: How many tasks were claimed from the beginning. The threads claim for their groups, too, hence the lock.
        self.claimed = 0
        self._counting = threading.Lock()
        # Nothing was claimed because too much waits for the database: whoever settles has to say when that is over.
        self._is_held_back = False
        self._cost: float | None = None
        # Seconds that a task may cost so that the most may wait that ever do.
        self._short = threads * AHEAD / MOST_AHEAD
        self._ahead = 0

    @property
    def unsettled(self) -> int:
        """Endings that wait for the database; about right, as several threads move them meanwhile."""
        return self.outbox.qsize() + self.settling

    @property
    def running(self) -> int:
        """Tasks that are being run; about right, too."""
        return max(0, len(self.claims) - self.inbox.qsize() - self.unsettled)

    def room(self) -> int:
        """Return how many tasks to claim now."""
        if self.unsettled > MOST_UNSETTLED:
            self._is_held_back = True
            return 0
        if self.running_async >= MOST_ASYNC:
            return 0
        waiting = len(self.claims) - self.unsettled - self.running_async - self.threads
        if waiting * 2 > self._ahead:
            # A claim takes about as long for a few as for many.
            return 0
        most = MOST_AT_ONCE if self.left is None else min(MOST_AT_ONCE, self.left)
        return max(0, min(most, self._ahead - waiting))

    def task_ids(self) -> list[int]:
        """Return the ids of the tasks in hand."""
        return [task_id for task_id, _attempt in list(self.claims)]

    def groups_under_way(self) -> list[str]:
        """Return the lock keys for whose groups threads are claiming now."""
        return [key for key in list(self.gathering.values()) if key is not None]

    def take(self, claims: Sequence[Claim]) -> None:
        """Add claims, in the order in which they are to run."""
        self.hold(claims)
        if self.left is not None:
            self.left -= len(claims)
        for claim in claims:
            self.inbox.put(claim)

    def hold(self, claims: Sequence[Claim]) -> None:
        """Add claims that are run already."""
        self.claims.update(zip(map(attrgetter("id", "attempt"), claims), claims, strict=True))
        with self._counting:
            self.claimed += len(claims)

    def ended(self, ending: Ending, cost: float) -> None:
        """Pass an ending on to the settler; ``cost`` is how many seconds the attempt kept a thread."""
        self.done += 1  # only whether it changes is looked at
        self._note_cost(cost)
        self.outbox.put(ending)
        for companion in ending.companions:
            self.outbox.put(companion)
        if self.inbox.qsize() * 2 <= self._ahead and not self.hungry.is_set():
            self.hungry.set()

    def expect_cost(self, cost: float) -> None:
        """Expect tasks to cost this many seconds, until they prove to be quicker."""
        self._cost = cost
        self._ahead = int(min(MOST_AHEAD, self.threads * AHEAD / max(cost, 1e-6)))

    def _note_cost(self, cost: float) -> None:
        known = self._cost
        if known is not None and known < self._short and cost < self._short:
            # As many as may wait do so in any case.
            return
        # Follows upwards fast and downwards slowly: to hoard long tasks is worse than to wait for short ones.
        self.expect_cost(cost if known is None else known + (cost - known) * (0.3 if cost > known else 0.03))

    def let_go(self, endings: Sequence[Ending]) -> None:
        """Forget claims that were settled or lost."""
        for key in map(attrgetter("claim.id", "claim.attempt"), endings):
            self.claims.pop(key, None)
        if self._is_held_back:
            self._is_held_back = False
            self.hungry.set()

    def give_back(self) -> int:
        """Take back what no thread has begun and have its claims released. Returns how many."""
        count = 0
        while True:
            try:
                claim = self.inbox.get_nowait()
            except Empty:
                return count
            if claim is not None:
                self.release(claim)
                count += 1
                if self.left is not None:
                    self.left += 1

    def release(self, claim: Claim) -> None:
        """Have a claim released that nobody has begun."""
        self.outbox.put(Ending(claim, Released()))

    def abandon(self, claims: Sequence[Claim], delay: float) -> None:
        """Have tasks that still run here run again elsewhere, in ``delay`` seconds; what comes of them here is lost."""
        for claim in claims:
            self.outbox.put(Ending(claim, Abandoned(delay)))
