"""The advisory lock of a worker: while a session holds it, the worker counts as alive for longer.

Behind a pooler no session is the worker's own. There it holds no lock, and its row says so. A pooler that gives its
clients other process numbers than the server's is recognised; others have to be named by ``--no-listen``.
"""

from __future__ import annotations

from django_pglock.keys.reserved import draw_number
from django_pglock.store.worker_lock import lock_worker, unlock_worker


class WorkerLock:
    """The lock of one worker, in a session that the thread uses under its alias."""

    def __init__(self, using: str, *, is_pooled: bool = False) -> None:
        self.using = using
        self.is_pooled = is_pooled
        #: The number of the lock that the session holds, or would hold without a pooler.
        self.number = draw_number()
        # Whether the present session holds it; None: that has not been tried yet.
        self._is_held: bool | None = None

    @property
    def is_held(self) -> bool:
        """Whether the present session holds it."""
        return bool(self._is_held)

    @property
    def held_number(self) -> int | None:
        """The number for the worker's row: None if no session holds the lock."""
        return self.number if self._is_held else None

    def note_session(self) -> None:
        """Note that the session is gone, and that another one may have its place."""
        self._is_held = False if self.is_pooled else None

    def hold(self) -> None:
        """Take the lock, unless this session has it or is shared through a pooler.

        Another worker may have drawn the same number, or an earlier session of ours, half open, may still hold the
        lock. Then we draw another number, and the next beat writes it into the worker's row.
        """
        while self._is_held is None:
            is_held = lock_worker(self.using, self.number)
            if is_held is False:
                self.number = draw_number()
            else:
                self._is_held = bool(is_held)

    def release(self) -> None:
        """Release the lock, if this session has it."""
        if self._is_held:
            self._is_held = None
            unlock_worker(self.using, self.number)
