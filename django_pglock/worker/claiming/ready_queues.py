"""A short-lived cache of the queues that have ready tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from django_pglock.store.ready import ready_queues
from django_pglock.worker.claiming.queue_cursor import LIFETIME_FACTOR, LONGEST_LIFETIME


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
