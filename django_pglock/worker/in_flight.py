"""What the process has in hand: claims that wait for a thread, run, or wait to be settled.

The fetcher puts claims in, executor threads take them and put outcomes in, the settler takes those and lets go.
Python's SimpleQueue and dict are safe between threads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from queue import SimpleQueue
from typing import TYPE_CHECKING

from django_pglock.store.outcome import Abandoned, Outcome, Released
from django_pglock.tasks import registry
from django_pglock.tasks.claim import Claim
from django_pglock.worker.capacity import LoopCapacity, ThreadCapacity

if TYPE_CHECKING:
    from django_pglock.tasks.compat import TaskResult

#: Outcomes that may wait for the database. While more do, nothing new is claimed.
MOST_UNSETTLED = 5000


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
    #: How long the function ran, if it began.
    seconds: float | None = None
    #: The endings of the other claims that were run by the same call.
    companions: Sequence[Ending] = ()


class Hand:
    """The claims of this process, and how many more it should ask for."""

    def __init__(self, threads: int, *, most: int | None = None) -> None:
        #: How many more tasks the process may claim, if that is limited; what a group takes along is not counted.
        self.left = most
        #: Set when the fetcher should look again: a thread is short of work, there is news, or the end.
        self.hungry = threading.Event()
        #: Whether something may be ready that was not there at the last look. Set before ``hungry``.
        self.has_news = False
        self.threads = ThreadCapacity(threads, self._make_hungry)
        self.coroutines = LoopCapacity(self._make_hungry)
        self.outbox: SimpleQueue[Ending | None] = SimpleQueue()
        # By id and attempt: a task that was given back may be claimed again before its old claim is let go.
        self.claims: dict[tuple[int, int], Claim] = {}
        #: Lock keys for whose groups threads are claiming, by the claims that run already.
        self.gathering: dict[Claim, str | None] = {}
        #: Endings that the settler has taken and not yet written. Only the settler sets it.
        self.settling = 0
        #: How many tasks were claimed from the beginning. The threads claim for their groups, too, hence the lock.
        self.claimed = 0
        self._counting = threading.Lock()
        # Nothing was claimed because too much waits for the database: whoever settles has to say when that is over.
        self._is_held_back = False

    @property
    def waiting(self) -> int:
        """Claims that nobody has begun."""
        return self.threads.waiting + self.coroutines.inbox.qsize()

    @property
    def unsettled(self) -> int:
        """Endings that wait for the database; about right, as several threads move them meanwhile."""
        return self.outbox.qsize() + self.settling

    @property
    def running(self) -> int:
        """Tasks that are being run; about right, too."""
        return max(0, len(self.claims) - self.waiting - self.unsettled)

    @property
    def has_ended_any(self) -> bool:
        """Whether the process has run anything to its end."""
        return bool(self.threads.ended or self.coroutines.ended)

    def may_claim(self) -> bool:
        """Say whether the process may claim anything at all now, whatever is free."""
        if self.unsettled > MOST_UNSETTLED:
            self._is_held_back = True
            return False
        return True

    def tell_news(self) -> None:
        """Say that something may have become ready."""
        self.has_news = True
        self.hungry.set()

    def _make_hungry(self) -> None:
        if not self.hungry.is_set():
            self.hungry.set()

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
            self.begin(claim)

    def begin(self, claim: Claim) -> None:
        """Have a claim in hand begun by what runs its kind of function."""
        if registry.is_async(claim.task_path):
            self.coroutines.put(claim)
        else:
            self.threads.put(claim)

    def hold(self, claims: Sequence[Claim]) -> None:
        """Add claims that are run already."""
        self.claims.update(zip(map(attrgetter("id", "attempt"), claims), claims, strict=True))
        with self._counting:
            self.claimed += len(claims)

    def ended(self, ending: Ending) -> None:
        """Pass an ending on to the settler."""
        self.outbox.put(ending)
        for companion in ending.companions:
            self.outbox.put(companion)

    def let_go(self, endings: Sequence[Ending]) -> None:
        """Forget claims that were settled or lost."""
        for key in map(attrgetter("claim.id", "claim.attempt"), endings):
            self.claims.pop(key, None)
        if self._is_held_back:
            self._is_held_back = False
            self._make_hungry()

    def give_back(self) -> int:
        """Take back what nobody has begun and have its claims released. Returns how many."""
        claims = [*self.threads.take_back(), *self.coroutines.take_back()]
        for claim in claims:
            self.release(claim)
        if self.left is not None:
            self.left += len(claims)
        return len(claims)

    def release(self, claim: Claim) -> None:
        """Have a claim released that nobody has begun."""
        self.outbox.put(Ending(claim, Released()))

    def abandon(self, claims: Sequence[Claim], delay: float) -> None:
        """Have tasks that still run here run again elsewhere, in ``delay`` seconds; what comes of them here is lost."""
        for claim in claims:
            self.outbox.put(Ending(claim, Abandoned(delay)))
