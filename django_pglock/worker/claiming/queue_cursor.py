"""Claiming from queues, and remembering where the last claim of each ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django_pglock.store.claim import claim_statement, claims_of
from django_pglock.store.claim_fair import claim_fair

if TYPE_CHECKING:
    from django_pglock.tasks.claim import Claim

#: Seconds after which a claim looks from the start again at the latest; for then it sees what is more urgent, and what
#: was committed late.
LONGEST_LINE = 1.0
#: It looks again sooner when that is cheap: so many times as long as the last look took.
LINE = 20
#: Seconds between two looks for tasks that ask for turns, where no function of this worker does.
BETWEEN_LOOKS_FOR_FAIR = 1.0
#: So many queues are remembered in any case.
FEW_QUEUES = 100


class WorkerClaims:
    """The claims of one worker, by queue.

    ``paths``: the functions it knows; ``is_fair``: whether one has ``fair=``; ``backend``: the one it serves, or None.
    """

    def __init__(
        self,
        using: str,
        *,
        worker: UUID,
        paths: Sequence[str],
        is_fair: bool,
        backend: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.using = using
        self.worker = worker
        self.paths = paths
        self.is_fair = is_fair
        self.backend = backend
        self.clock = clock
        # For all queues, whose names are filled in: there may be one for each of a hundred thousand tenants.
        self.first = claim_statement(using, worker=worker, paths=paths, backend=backend)
        self.behind = claim_statement(using, worker=worker, paths=paths, backend=backend, behind=True)
        self._queues: dict[str, QueueClaims] = {}

    def of(self, queue: str) -> QueueClaims:
        """Return the claims from one queue."""
        if queue not in self._queues:
            self._queues[queue] = QueueClaims(self, queue)
        return self._queues[queue]

    def forget_others(self, queues: Sequence[str]) -> None:
        """Forget where the claims from other queues ended, when there are many more of these."""
        if len(self._queues) > 2 * len(queues) + FEW_QUEUES:
            self._queues = {queue: self._queues[queue] for queue in queues if queue in self._queues}


class QueueClaims:
    """The claims of one worker from one queue.

    While a transaction elsewhere is open, the entries of finished tasks stay in the index, and each claim would walk
    through all of them. So a claim draws a line in the sand: the next one begins behind it.
    """

    def __init__(self, shared: WorkerClaims, queue: str) -> None:
        self.shared = shared
        self.queue = queue
        self._line: tuple[int, int] | None = None
        self._line_until = 0.0
        self._last_key = ""
        self._fair_first = False
        self._has_fair = False
        self._look_for_fair_at = shared.clock() + BETWEEN_LOOKS_FOR_FAIR

    def claim(self, limit: int) -> list[Claim]:
        """Claim up to ``limit`` tasks, in the order in which they are to run."""
        if not self._takes_turns():
            return self._claim_plain(limit) or self._claim_fair(limit)
        self._fair_first = not self._fair_first
        first, second = (
            (self._claim_fair, self._claim_plain) if self._fair_first else (self._claim_plain, self._claim_fair)
        )
        claims = first(limit)
        return claims + second(limit - len(claims)) if len(claims) < limit else claims

    def _takes_turns(self) -> bool:
        """Say whether tasks with ``fair=`` are claimed as often as others.

        So they are where a function that this worker knows has it. Single calls may have it all the same, or code that
        is newer: they are looked for when there is nothing else, and now and then when there is.
        """
        if self.shared.is_fair or self._has_fair:
            return True
        now = self.shared.clock()
        if now < self._look_for_fair_at:
            return False
        self._look_for_fair_at = now + BETWEEN_LOOKS_FOR_FAIR
        self._fair_first = False
        return True

    def _claim_plain(self, limit: int) -> list[Claim]:
        rows: list[tuple[Any, ...]] = []
        if self._line is not None and self.shared.clock() < self._line_until:
            rows = self.shared.behind.execute(limit, self.queue, *self._line)
        if len(rows) < limit:
            began = self.shared.clock()
            rows += self.shared.first.execute(limit - len(rows), self.queue)
            self._line_until = self.shared.clock() + min(LONGEST_LINE, LINE * (self.shared.clock() - began))
        claims = claims_of(rows, self.shared.worker)
        self._line = (claims[-1].priority, claims[-1].id) if len(claims) == limit else None
        return claims

    def _claim_fair(self, limit: int) -> list[Claim]:
        after = self._last_key
        claims, self._last_key = self._claim_turn(limit, after)
        if len(claims) < limit and after and not self._last_key:
            # Behind the last key there was not enough: go on with the first.
            more, self._last_key = self._claim_turn(limit - len(claims), "")
            claims += more
        self._has_fair = bool(claims)
        return claims

    def _claim_turn(self, limit: int, after: str) -> tuple[list[Claim], str]:
        shared = self.shared
        return claim_fair(
            shared.using,
            worker=shared.worker,
            queue=self.queue,
            paths=shared.paths,
            after=after,
            limit=limit,
            backend=shared.backend,
        )
