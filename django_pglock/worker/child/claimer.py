"""The claims of one poll: for which kinds of functions, from which queues, and how many tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Literal
from uuid import UUID

from django.db import Error as DatabaseFailure

from django_pglock.store.rate import note_starts
from django_pglock.tasks import registry
from django_pglock.worker.child.in_flight import InFlight
from django_pglock.worker.child.queue_cursor import QueueCursors, ReadyQueues
from django_pglock.worker.queues import Queues

if TYPE_CHECKING:
    from django_pglock.tasks.claim import Claim

# Claims of one kind of functions, sync or async, while only this kind has capacity.
#
# The index of ready tasks has queues and priorities, but not functions. So a claim for one kind reads and skips all
# tasks of the other kind that come first. For threads such a claim is not postponed, because idle threads are worse.
# For the event loop there is a pause after each claim, so that these claims do not delay the threads for long.


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


#: Seconds after which a claim from many queues ends, and what it has got begins. The next one continues.
LONGEST_CLAIM = 0.05


class Claimer:
    """Claims tasks of the served queues, up to the free capacity, for sync and async functions together if possible.

    ``backend`` is the alias of the one backend to serve; None: all backends.
    """

    def __init__(
        self, in_flight: InFlight, using: str, worker: UUID, queues: Queues, *, backend: str | None = None
    ) -> None:
        self.in_flight = in_flight
        self.using = using
        self.worker = worker
        self.queues = queues
        self.backend = backend
        self.pauses = KindPauses()
        #: The kinds of functions that have capacity, and whose pause between two polls is not over.
        self.paused_kinds: list[FunctionKind] = []
        #: Whether any queue had ready tasks at the last claim.
        self.was_ready = False
        #: Whether the last claim got at least as many tasks as the smallest of its capacities. Then more tasks may be
        #: ready.
        self.was_full = False
        #: Whether the last claim has left out queues, because the others took long.
        self.has_left_queues = False
        self._ready = ReadyQueues(using)
        # The number of functions for which the cursors were made. Functions are only added, so another number means new
        # functions.
        self._known = -1
        self._kinds_known: list[FunctionKind] = []
        self._cursors: dict[FunctionKind, QueueCursors] = {}

    def free_capacities(self) -> list[tuple[FunctionKind, int]]:
        """Return the kinds of functions to claim now, and how many tasks of each."""
        left = self.in_flight.claims_left
        capacity_of = {SYNC: self.in_flight.threads.free_capacity, ASYNC: self.in_flight.coroutines.free_capacity}
        capacities = [(kind, capacity_of[kind]()) for kind in self._kinds()]
        if left is not None:
            capacities = [(kind, min(left, capacity)) for kind, capacity in capacities]
        self.paused_kinds = []
        if len(capacities) == 1:
            return [(kind, capacity) for kind, capacity in capacities if capacity]
        smaller = min(capacity for _, capacity in capacities)
        if smaller and not (self.was_full and left is None):
            # One statement for both kinds. If the capacity is enough for all ready tasks, no second statement is
            # needed.
            return [(BOTH, smaller)]
        self.paused_kinds = [kind for kind, capacity in capacities if capacity and self.pauses.next_in(kind) > 0]
        return [(kind, capacity) for kind, capacity in capacities if capacity and kind not in self.paused_kinds]

    def leaves_out_a_kind(self, capacities: list[tuple[FunctionKind, int]]) -> bool:
        """Return whether a claim for these capacities would leave out one of two kinds that the process knows."""
        return len(capacities) == 1 and capacities[0][0] != BOTH and len(self._kinds()) > 1

    def claim(self, capacities: list[tuple[FunctionKind, int]], *, notified: Collection[str] = ()) -> list[Claim]:
        """Claim up to these capacities. ``notified``: the queues that notifications have named; empty: find them."""
        self.has_left_queues = False
        ready = self._ready_queues(notified)
        claims = self._claim_each(capacities, ready)
        if not claims and self._ready.is_from_memory:
            self._ready.clear()
            now_ready = self._ready_queues()
            # Only the other queues: a claim that found nothing may have read a whole backlog of another kind of
            # functions.
            claims = self._claim_each(capacities, [queue for queue in now_ready if queue not in ready])
            self.was_ready = bool(now_ready)
        self.was_full = len(claims) >= min(capacity for _, capacity in capacities)
        if len(claims) < sum(capacity for _, capacity in capacities) and not self.has_left_queues:
            self._ready.clear()
        # After an error the claims are there nevertheless, and must begin.
        with suppress(DatabaseFailure):
            note_starts(self.using, claims)
        return claims

    def note_new_functions(self) -> None:
        """Note that the process knows more functions now, so tasks that it left out before may be claimed."""
        self._ready.clear()
        self.pauses.note_new_tasks()

    def _claim_each(self, capacities: list[tuple[FunctionKind, int]], ready: list[str]) -> list[Claim]:
        claims: list[Claim] = []
        self.was_ready = bool(ready)
        for kind, capacity in capacities:
            began = time.monotonic()
            queues = self._poll_order(ready, kind)
            is_only_kind = kind == BOTH or len(self._kinds()) == 1
            of_kind = self._claim_from(queues, self._cursors[kind], capacity, is_only_kind=is_only_kind)
            claims += of_kind
            if kind != BOTH:
                self.pauses.note(kind, took=time.monotonic() - began, found=len(of_kind))
        return claims

    def _claim_from(
        self, queues: list[str], cursors: QueueCursors, capacity: int, *, is_only_kind: bool
    ) -> list[Claim]:
        """Claim from one queue after the other. What was claimed begins soon, however many queues are ready."""
        claims: list[Claim] = []
        emptied = set()
        cursors.drop_others(queues)
        until = time.monotonic() + LONGEST_CLAIM
        for queue in queues:
            wanted = capacity - len(claims)
            found = cursors.of(queue).claim(wanted)
            claims += found
            if is_only_kind and len(found) < wanted and not (found and cursors.is_fair):
                emptied.add(queue)
            if len(found) == wanted:
                break
            if claims and time.monotonic() > until and queue != queues[-1]:
                self.has_left_queues = True
                break
        self._ready.forget(emptied)
        return claims

    def _ready_queues(self, notified: Collection[str] = ()) -> list[str]:
        """Return the queues to read. Query the database only if no notification has named one."""
        if notified:
            return sorted(notified)
        names = self._ready.names()
        if not self._ready.is_from_memory:
            for cursors in self._cursors.values():
                cursors.note_ready(names)
        return names

    def _poll_order(self, ready: list[str], kind: FunctionKind) -> list[str]:
        if len(ready) == 1 and self.queues.serves(ready[0]):
            return ready
        return self.queues.poll_order(ready, whose=ASYNC if kind == ASYNC else SYNC)

    def _kinds(self) -> list[FunctionKind]:
        """Return the kinds of the functions that are known by now. Make new cursors if functions were added."""
        if registry.count() != self._known:
            known = registry.known_paths()
            paths: dict[FunctionKind, list[str]] = {
                SYNC: [path for path in known if not registry.is_async(path)],
                ASYNC: [path for path in known if registry.is_async(path)],
                BOTH: known,
            }
            is_fair = registry.has_fair()
            self._known = len(known)
            self._cursors = {
                kind: QueueCursors(
                    self.using, worker=self.worker, paths=paths[kind], is_fair=is_fair, backend=self.backend
                )
                for kind in paths
            }
            # If no function is known, the claim itself finds nothing.
            self._kinds_known = [kind for kind in (SYNC, ASYNC) if paths[kind]] or [SYNC]
        return self._kinds_known
