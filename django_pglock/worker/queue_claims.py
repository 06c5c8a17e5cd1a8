"""Claiming from one queue, and remembering where the last claim ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

if TYPE_CHECKING:
    from django_pglock.tasks.claim import Claim
    from django_pglock.tasks.queryset import TaskQuerySet

#: Seconds after which a claim looks from the start again at the latest; for then it sees what is more urgent, and what
#: was committed late.
LONGEST_LINE = 1.0
#: It looks again sooner when that is cheap: so many times as long as the last look took.
LINE = 20


class QueueClaims:
    """The claims of one worker from one queue.

    While a transaction elsewhere is open, the entries of finished tasks stay in the index, and each claim would walk
    through all of them. So a claim draws a line in the sand: the next one begins behind it.
    """

    def __init__(
        self,
        rows: TaskQuerySet,
        *,
        worker: UUID,
        queue: str,
        paths: Sequence[str],
        is_fair: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rows = rows
        self.worker = worker
        self.queue = queue
        self.paths = paths
        #: Whether a function with ``fair=`` is known, so that its tasks are to be looked for first as often as others.
        self.is_fair = is_fair
        self._clock = clock
        self._statement = rows.claim_statement(worker=worker, queue=queue, paths=paths)
        self._behind = rows.claim_statement(worker=worker, queue=queue, paths=paths, behind=True)
        self._line: tuple[int, int] | None = None
        self._line_until = 0.0
        self._last_key = ""
        self._fair_first = False

    def claim(self, limit: int) -> list[Claim]:
        """Claim up to ``limit`` tasks, in the order in which they are to run."""
        if not self.is_fair:
            claims = self._claim_plain(limit)
            # Rows that ask for turns may come from elsewhere; they are looked for when there is nothing else.
            return claims or self._claim_fair(limit)
        self._fair_first = not self._fair_first
        first, second = (
            (self._claim_fair, self._claim_plain) if self._fair_first else (self._claim_plain, self._claim_fair)
        )
        claims = first(limit)
        return claims + second(limit - len(claims)) if len(claims) < limit else claims

    def _claim_plain(self, limit: int) -> list[Claim]:
        rows: list[tuple[Any, ...]] = []
        if self._line is not None and self._clock() < self._line_until:
            rows = self._behind.execute(limit, *self._line)
        if len(rows) < limit:
            began = self._clock()
            rows += self._statement.execute(limit - len(rows))
            self._line_until = self._clock() + min(LONGEST_LINE, LINE * (self._clock() - began))
        claims = self.rows.claims_of(rows, self.worker)
        self._line = (claims[-1].priority, claims[-1].id) if len(claims) == limit else None
        return claims

    def _claim_fair(self, limit: int) -> list[Claim]:
        after = self._last_key
        claims, self._last_key = self._claim_turn(limit, after)
        if len(claims) < limit and after:
            # Behind the last key there was not enough: go on with the first.
            more, last_key = self._claim_turn(limit - len(claims), "")
            claims, self._last_key = claims + more, last_key or self._last_key
        return claims

    def _claim_turn(self, limit: int, after: str) -> tuple[list[Claim], str]:
        return self.rows.claim_fair(worker=self.worker, queue=self.queue, paths=self.paths, after=after, limit=limit)
