"""An event that a signal handler may set."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue


class SignalSafeEvent:
    """The part of ``threading.Event`` that a signal handler may use, even while its own thread waits for or sets it.

    A signal handler runs in the middle of other code of the same thread. ``threading.Event`` would then take its lock
    twice in one thread, which is a deadlock. ``SimpleQueue`` is safe there.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._wakeup: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Set the event and wake the thread that waits for it."""
        self._is_set = True
        self._wakeup.put(None)

    def is_set(self) -> bool:
        """Return whether the event has been set."""
        return self._is_set

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until the event is set. Return whether it is set."""
        if not self._is_set:
            with suppress(Empty):
                # Put the item back, because other threads may wait, too.
                self._wakeup.put(self._wakeup.get(timeout=timeout))
        return self._is_set
