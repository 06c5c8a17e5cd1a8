"""Which queues have something ready, remembered for as long as that is worth."""

from __future__ import annotations

import time
from collections.abc import Callable

from django_pglock.store.ready import ready_queues
from django_pglock.worker.claiming.queue_cursor import LINE, LONGEST_LINE


class ReadyQueues:
    """The names of the queues that have something ready.

    While a transaction elsewhere is open, the entries of finished tasks stay in the index, and each look would walk
    through all of them, for each claim. So the answer holds for so many times as long as it took, as the line does that
    a claim draws (queue_cursor.py): what comes to be ready in another queue waits no longer than that.
    """

    def __init__(self, using: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.using = using
        self._clock = clock
        self._names: list[str] = []
        self._until = 0.0
        #: Whether the last answer was remembered, and may have been wrong.
        self.is_from_memory = False

    def names(self) -> list[str]:
        """Return the names."""
        began = self._clock()
        self.is_from_memory = began < self._until
        if not self.is_from_memory:
            self._names = ready_queues(self.using)
            now = self._clock()
            self._until = now + min(LONGEST_LINE, LINE * (now - began))
        return self._names

    def forget(self) -> None:
        """Look again the next time: what was ready did not suffice."""
        self._until = 0.0
