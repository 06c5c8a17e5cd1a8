"""Claims tasks from queues, with a cursor for each queue: the position in the index where the last claim ended.

While another transaction is open, the index entries of finished tasks cannot be removed, and each claim from the start
of the index would read all of them. So a claim begins behind the position where the last one ended. For the same reason
the names of the queues with ready tasks are cached. All of this is used for a time in proportion to what it takes to
find it again, a second at most.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from django.db import Error as DatabaseFailure

from django_pglock.store.claim import ClaimStatement, claim_fair, claim_statement, claims_of
from django_pglock.store.rate import note_starts
from django_pglock.store.ready import ready_paths, ready_queues
from django_pglock.tasks import registry
from django_pglock.tasks.registry import import_function
from django_pglock.worker.queues import Queues

if TYPE_CHECKING:
    from django_pglock.tasks.claim import Claim

#: The functions that a claim is for: those that need a thread, those that need a slot of the event loop, or all that
#: the process knows.
FunctionKind = Literal["sync", "async", "all"]
SYNC: FunctionKind = "sync"
ASYNC: FunctionKind = "async"
ALL: FunctionKind = "all"

#: The longest lifetime of a cursor and of the names of queues in seconds. After that, a claim from the start of the
#: index finds tasks with a higher priority, and tasks that were committed late.
LONGEST_LIFETIME = 1.0
#: The lifetime as a multiple of the time that it took to claim from the start, or to find the queues.
LIFETIME_FACTOR = 20
#: The number of queues up to which all cursors are kept.
FEW_QUEUES = 100
#: Seconds after which a claim from many queues ends, and what it has got begins. The next one continues.
LONGEST_CLAIM = 0.05


class Claimer:
    """Claims tasks of the served queues. ``backend`` is the alias of the one backend to serve; None: all backends."""

    def __init__(
        self,
        using: str,
        worker: UUID,
        queues: Queues,
        *,
        backend: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.using = using
        self.worker = worker
        self.queues = queues
        self.backend = backend
        #: Whether the last claim got all that it asked for, or has left out queues because the others took long.
        self.has_more = False
        #: Whether any queue had ready tasks at the last claim.
        self.was_ready = False
        #: Whether the last search has found tasks whose functions this process does not know.
        self.has_unknown = False
        self._clock = clock
        #: When the modules that ready tasks name were last searched for, by time.monotonic().
        self.searched_at = -math.inf
        # The queues that had ready tasks when they were last read, whether also with ``fair=``, and until when this is
        # used.
        self._ready: dict[str, bool] = {}
        self._ready_until = 0.0
        # The number of functions for which the cursors were made. Functions are only added.
        self._known = -1
        self._cursors: dict[FunctionKind, QueueCursors] = {}

    @property
    def kinds(self) -> Sequence[FunctionKind]:
        """The kinds of the functions that are known by now: sync, async, or both."""
        self._note_functions()
        return [kind for kind in (ASYNC, SYNC) if self._cursors[kind].paths] or [SYNC]

    def _note_functions(self) -> None:
        if registry.count() != self._known:
            known = registry.known_paths()
            paths = {
                ASYNC: [path for path in known if registry.is_async(path)],
                SYNC: [path for path in known if not registry.is_async(path)],
                ALL: known,
            }
            self._known = len(known)
            self._cursors = {
                kind: QueueCursors(self.using, self.worker, paths[kind], self.backend, self._clock) for kind in paths
            }

    def search(self) -> bool:
        """Import the modules that ready tasks name, if ``tasks/registry.py`` allows it. Return whether it found any."""
        self.searched_at = time.monotonic()
        served = {path for queue, path in ready_paths(self.using) if self.queues.serves(queue)}
        unknown = [path for path in sorted(served) if registry.find(path) is None]
        found = [path for path in unknown if import_function(path)]
        self.has_unknown = len(found) < len(unknown)
        return bool(found)

    def claim(self, kind: FunctionKind, limit: int, *, notified: Collection[str] = ()) -> list[Claim]:
        """Claim up to ``limit`` tasks. ``notified``: the queues that notifications have named; empty: find them."""
        self._note_functions()
        is_cached = not notified and self._clock() < self._ready_until
        ready = dict.fromkeys(notified, False) if notified else dict(self._ready) if is_cached else self._find_ready()
        self.has_more, self.was_ready = False, bool(ready)
        claims = self._claim_from(ready, kind, limit)
        if not claims and is_cached:
            found = self._find_ready()
            self.was_ready = bool(found)
            # Only the other queues: a claim that found nothing may have read a whole backlog of another kind of
            # functions.
            claims = self._claim_from({queue: found[queue] for queue in found if queue not in ready}, kind, limit)
        self.has_more = self.has_more or len(claims) >= limit
        if not self.has_more:
            self._ready_until = 0.0
        # After an error the claims are there nevertheless, and must begin.
        with suppress(DatabaseFailure):
            note_starts(self.using, claims)
        return claims

    def _find_ready(self) -> dict[str, bool]:
        began = self._clock()
        self._ready = ready_queues(self.using)
        self._ready_until = lifetime_end(self._clock(), began)
        return dict(self._ready)

    def _claim_from(self, ready: Mapping[str, bool], kind: FunctionKind, limit: int) -> list[Claim]:
        """Claim from one queue after the other. What was claimed begins soon, however many queues are ready."""
        claims: list[Claim] = []
        until, cursors = self._clock() + LONGEST_CLAIM, self._cursors[kind]
        queues = self.queues.poll_order(list(ready), whose=ASYNC if kind == ASYNC else SYNC)
        cursors.drop_others(queues)
        for queue in queues:
            if len(claims) == limit or (claims and self._clock() > until):
                self.has_more = True
                break
            wanted = limit - len(claims)
            found = cursors.of(queue).claim(wanted, has_fair=ready[queue])
            claims += found
            if len(found) < wanted:
                self._ready.pop(queue, None)
        return claims


@dataclass(eq=False)
class QueueCursors:
    """The cursors of one worker, by queue.

    ``paths`` are the functions that the worker may claim. ``backend`` is the alias of the backend that the worker
    serves (None: all).
    """

    using: str
    worker: UUID
    paths: Sequence[str]
    backend: str | None = None
    clock: Callable[[], float] = time.monotonic
    queues: dict[str, QueueCursor] = field(default_factory=dict)

    # One statement for all queues, with the name as a parameter, because there may be a hundred thousand queues. A
    # statement is made at its first use, because many workers have functions of one kind only.
    @cached_property
    def first(self) -> ClaimStatement:
        """The statement that claims from the start of a queue."""
        return claim_statement(self.using, worker=self.worker, paths=self.paths, backend=self.backend)

    @cached_property
    def behind(self) -> ClaimStatement:
        """The statement that claims behind the position where the last claim ended."""
        return claim_statement(self.using, worker=self.worker, paths=self.paths, backend=self.backend, behind=True)

    def of(self, queue: str) -> QueueCursor:
        """Return the cursor of one queue."""
        if queue not in self.queues:
            self.queues[queue] = QueueCursor(self, queue)
        return self.queues[queue]

    def drop_others(self, queues: Sequence[str]) -> None:
        """Drop the cursors of other queues, if there are many more other queues than ``queues``."""
        if len(self.queues) > 2 * len(queues) + FEW_QUEUES:
            self.queues = {queue: self.queues[queue] for queue in queues if queue in self.queues}


class QueueCursor:
    """Claims the tasks of one queue for one worker.

    As long as there are tasks with ``fair=`` that the worker may claim, claims alternate between these and other tasks.
    """

    def __init__(self, shared: QueueCursors, queue: str) -> None:
        self.shared = shared
        self.queue = queue
        self._position: tuple[int, int] | None = None
        self._valid_until = 0.0
        self._last_key = ""
        self._is_fair_first = False
        # Until when tasks with ``fair=`` are not searched while there are others: this worker may not run them.
        self._no_fair_until = 0.0

    def claim(self, limit: int, *, has_fair: bool) -> list[Claim]:
        """Claim up to ``limit`` tasks, in the order in which they are to run."""
        first, second = self._claim_plain, self._claim_fair
        if alternates := has_fair and self.shared.clock() >= self._no_fair_until:
            self._is_fair_first = not self._is_fair_first
            if self._is_fair_first:
                first, second = second, first
        claims = first(limit)
        if len(claims) < limit and (alternates or not claims):
            claims += second(limit - len(claims))
        return claims

    def _claim_plain(self, limit: int) -> list[Claim]:
        rows: list[tuple[Any, ...]] = []
        if self._position is not None and self.shared.clock() < self._valid_until:
            rows = self.shared.behind.execute(limit, self.queue, *self._position)
        if len(rows) < limit:
            began = self.shared.clock()
            rows += self.shared.first.execute(limit - len(rows), self.queue)
            self._valid_until = lifetime_end(self.shared.clock(), began)
        claims = claims_of(rows, self.shared.worker)
        self._position = (claims[-1].priority, claims[-1].id) if len(claims) == limit else None
        return claims

    def _claim_fair(self, limit: int) -> list[Claim]:
        began, after = self.shared.clock(), self._last_key
        claims = self._claim_fair_behind(after, limit)
        if len(claims) < limit and after and not self._last_key:
            # There were not enough tasks behind the last key: continue from the first key.
            claims += self._claim_fair_behind("", limit - len(claims))
        if not claims:
            self._no_fair_until = lifetime_end(self.shared.clock(), began)
        return claims

    def _claim_fair_behind(self, after: str, limit: int) -> list[Claim]:
        own = self.shared
        claims, self._last_key = claim_fair(
            own.using,
            worker=own.worker,
            queue=self.queue,
            paths=own.paths,
            after=after,
            limit=limit,
            backend=own.backend,
        )
        return claims


def lifetime_end(now: float, began: float) -> float:
    """Return until when something is used that was read between these two moments."""
    return now + min(LONGEST_LIFETIME, LIFETIME_FACTOR * (now - began))
