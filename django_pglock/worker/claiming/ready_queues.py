"""Which queues have something ready, remembered for a short time."""

from __future__ import annotations

import time
from collections.abc import Callable

from django_pglock.store.ready import ready_queues
from django_pglock.worker.claiming.queue_cursor import LIFETIME_FACTOR, LONGEST_LIFETIME


class ReadyQueues:
    """The names of the queues that have something ready.

    While a transaction elsewhere is open, the entries of finished tasks stay in the index, and a query for each claim
    would walk through all of them each time. So an answer has a lifetime like a cursor (``queue_cursor.py``), in
    proportion to the time that the query took. A task in another queue waits no longer than that.
    """

    def __init__(self, using: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.using = using
        self._clock = clock
        self._names: list[str] = []
        self._until = 0.0
        #: Whether the last answer was a remembered one, and may be out of date.
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

    def forget(self) -> None:
        """Look again the next time."""
        self._until = 0.0
