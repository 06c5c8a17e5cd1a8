"""Claims from queues, with a cursor for each queue: the position in the index where the last claim ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django_pglock.store.claim import ClaimStatement, claim_fair, claim_statement, claims_of
from django_pglock.store.ready import ready_queues

if TYPE_CHECKING:
    from django_pglock.tasks.claim import Claim

#: The longest lifetime of a cursor in seconds. After that, a claim from the start of the index finds tasks with a
#: higher priority, and tasks that were committed late.
LONGEST_LIFETIME = 1.0
#: The lifetime of a cursor, as a multiple of the time that the claim from the start took.
LIFETIME_FACTOR = 20
#: Seconds between two checks for tasks with ``fair=`` while only other tasks come: if no function that this worker
#: knows has ``fair=``, and if one has it.
FAIR_CHECK_INTERVAL, KNOWN_FAIR_CHECK_INTERVAL = 1.0, 0.1
#: The number of queues up to which all cursors are kept.
FEW_QUEUES = 100


class QueueCursors:
    """The cursors of one worker, by queue.

    ``paths`` are the functions that the worker may claim. ``is_fair``: whether one of them has ``fair=``. ``backend``
    is the alias of the backend that the worker serves (None: all).
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
        self._queues: dict[str, QueueCursor] = {}

    # One statement for all queues, with the name as a parameter, because there may be a hundred thousand queues. A
    # statement is compiled at its first use, because many workers have functions of one kind only.
    @cached_property
    def first(self) -> ClaimStatement:
        """The statement that claims from the start of a queue."""
        return self._statement(behind=False)

    @cached_property
    def behind(self) -> ClaimStatement:
        """The statement that claims behind the position where the last claim ended."""
        return self._statement(behind=True)

    def _statement(self, *, behind: bool) -> ClaimStatement:
        return claim_statement(self.using, worker=self.worker, paths=self.paths, backend=self.backend, behind=behind)

    def of(self, queue: str) -> QueueCursor:
        """Return the cursor of one queue."""
        if queue not in self._queues:
            self._queues[queue] = QueueCursor(self, queue)
        return self._queues[queue]

    def note_ready(self, ready: Iterable[str]) -> None:
        """Note that only these queues have ready tasks. The other queues need no check for tasks with ``fair=``."""
        for name in self._queues.keys() - ready:
            self._queues[name].note_empty()

    def drop_others(self, queues: Sequence[str]) -> None:
        """Drop the cursors of other queues, if there are many more other queues than ``queues``."""
        if len(self._queues) > 2 * len(queues) + FEW_QUEUES:
            self._queues = {queue: self._queues[queue] for queue in queues if queue in self._queues}


class QueueCursor:
    """Claims the tasks of one queue for one worker.

    While another transaction is open, the index entries of finished tasks cannot be removed, and each claim would read
    all of them. So the cursor keeps the position where a claim ended, and the next claim begins behind it.
    """

    def __init__(self, shared: QueueCursors, queue: str) -> None:
        self.shared = shared
        self.queue = queue
        self._position: tuple[int, int] | None = None
        self._valid_until = 0.0
        self._last_key = ""
        self._fair_first = False
        self._has_fair = False
        # When to check for tasks with ``fair=`` although there are other tasks. None: the check was just before.
        self._check_fair_at: float | None = shared.clock() if shared.is_fair else None
        # When a claim last took all ready tasks without ``fair=``.
        self._emptied_at = float("inf")

    def claim(self, limit: int) -> list[Claim]:
        """Claim up to ``limit`` tasks, in the order in which they are to run."""
        if not self._alternates():
            return self._claim_plain_first(limit)
        self._fair_first = not self._fair_first
        first, second = (
            (self._claim_fair, self._claim_plain) if self._fair_first else (self._claim_plain, self._claim_fair)
        )
        claims = first(limit)
        return claims + second(limit - len(claims)) if len(claims) < limit else claims

    def note_empty(self) -> None:
        """Note that nothing is ready, with ``fair=`` or without."""
        self._has_fair, self._check_fair_at = False, None

    def _alternates(self) -> bool:
        """Return whether claims alternate between tasks with ``fair=`` and other tasks.

        They alternate as long as there are tasks with ``fair=``. While there are none, each check for them would cost
        as much as a claim. So the check is done if there are no other tasks. If there are, it is done from time to
        time: more often if a function that this worker knows has ``fair=``, more rarely if only a single call or newer
        code on another host may have it.
        """
        if not self._has_fair:
            now = self.shared.clock()
            if now - self._emptied_at > self._fair_check_interval:
                # The worker had free capacity then, so it has polled again until it found nothing.
                self._check_fair_at = None
            if self._check_fair_at is None or now < self._check_fair_at:
                return False
            self._fair_first = False
        return True

    @property
    def _fair_check_interval(self) -> float:
        return KNOWN_FAIR_CHECK_INTERVAL if self.shared.is_fair else FAIR_CHECK_INTERVAL

    def _claim_plain_first(self, limit: int) -> list[Claim]:
        claims = self._claim_plain(limit)
        if not claims:
            return self._claim_fair(limit)
        now = self.shared.clock()
        if self._check_fair_at is None:
            self._check_fair_at = now + self._fair_check_interval
        self._emptied_at = now if len(claims) < limit else float("inf")
        return claims

    def _claim_plain(self, limit: int) -> list[Claim]:
        rows: list[tuple[Any, ...]] = []
        if self._position is not None and self.shared.clock() < self._valid_until:
            rows = self.shared.behind.execute(limit, self.queue, *self._position)
        if len(rows) < limit:
            began = self.shared.clock()
            rows += self.shared.first.execute(limit - len(rows), self.queue)
            self._valid_until = self.shared.clock() + min(
                LONGEST_LIFETIME, LIFETIME_FACTOR * (self.shared.clock() - began)
            )
        claims = claims_of(rows, self.shared.worker)
        self._position = (claims[-1].priority, claims[-1].id) if len(claims) == limit else None
        return claims

    def _claim_fair(self, limit: int) -> list[Claim]:
        after = self._last_key
        claims, self._last_key = self._claim_fair_after(limit, after)
        if len(claims) < limit and after and not self._last_key:
            # There were not enough tasks behind the last key: continue from the first key.
            more, self._last_key = self._claim_fair_after(limit - len(claims), "")
            claims += more
        self._has_fair, self._check_fair_at = bool(claims), None
        return claims

    def _claim_fair_after(self, limit: int, after: str) -> tuple[list[Claim], str]:
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


class ReadyQueues:
    """The names of the queues that have ready tasks.

    While another transaction is open, the index entries of finished tasks cannot be removed, and a query for each claim
    would read all of them each time. So an answer is cached. Its lifetime is proportional to the time that the query
    took, as that of a cursor (``queue_cursor.py``). A task in another queue does not wait longer than this lifetime.
    """

    def __init__(self, using: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.using = using
        self._clock = clock
        self._names: list[str] = []
        self._until = 0.0
        #: Whether the last answer came from the cache, and may be out of date.
        self.is_from_memory = False

    def names(self) -> list[str]:
        """Return the names."""
        began = self._clock()
        self.is_from_memory = began < self._until
        if not self.is_from_memory:
            self._names = ready_queues(self.using)
            now = self._clock()
            self._until = now + min(LONGEST_LIFETIME, LIFETIME_FACTOR * (now - began))
        return self._names

    def forget(self, names: Collection[str]) -> None:
        """Take the names of queues that have been emptied out of the cache."""
        self._names = [name for name in self._names if name not in names]

    def clear(self) -> None:
        """Clear the cache, so that the next call queries the database."""
        self._until = 0.0
