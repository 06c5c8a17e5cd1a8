"""The advisory lock of a worker. While a session holds it, missing heartbeats of the worker are tolerated for longer.

Behind a pooler in transaction mode, a worker has no session of its own. There it holds no lock, and its row says so.
The pooler is detected if the process number that it gives to the client is not that of the server. Otherwise the worker
must be started with ``--no-listen``.
"""

from __future__ import annotations

from django_pglock.keys.reserved import draw_number
from django_pglock.store.worker_lock import lock_worker, unlock_worker


class WorkerLock:
    """The lock of one worker, in the session that the current thread uses for the database alias."""

    def __init__(self, using: str, *, is_pooled: bool = False) -> None:
        self.using = using
        self.is_pooled = is_pooled
        #: The number of the lock. Behind a pooler the session does not hold it.
        self.number = draw_number()
        # Whether the present session holds the lock; None: not tried yet.
        self._is_held: bool | None = None

    @property
    def is_held(self) -> bool:
        """Whether the present session holds the lock."""
        return bool(self._is_held)

    @property
    def held_number(self) -> int | None:
        """The number for the worker's row: None if no session holds the lock."""
        return self.number if self._is_held else None

    def note_session(self) -> None:
        """Note that the session has ended. The next one does not hold the lock yet."""
        self._is_held = False if self.is_pooled else None

    def hold(self) -> None:
        """Take the lock, unless this session holds it or belongs to a pooler.

        Another worker may have drawn the same number, or an earlier, half-open session of ours may still hold the lock.
        Then another number is drawn, and the next beat writes it into the worker's row.
        """
        while self._is_held is None:
            is_held = lock_worker(self.using, self.number)
            if is_held is False:
                self.number = draw_number()
            else:
                self._is_held = bool(is_held)

    def release(self) -> None:
        """Release the lock, if this session holds it."""
        if self._is_held:
            self._is_held = None
            unlock_worker(self.using, self.number)
