"""The signals that stop a worker, and an event that a signal handler may set."""

from __future__ import annotations

import signal
from contextlib import suppress
from queue import Empty, SimpleQueue

#: SIGHUP comes when a terminal or an ssh session is closed. Windows has no such signal.
HANG_UP: int | None = getattr(signal, "SIGHUP", None)


def stop_signals() -> list[int]:
    """Return the signals that stop a worker in this process. ``nohup`` has SIGHUP ignored, and that stays so."""
    is_heard = HANG_UP is not None and signal.getsignal(HANG_UP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([HANG_UP] if HANG_UP is not None and is_heard else [])]


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
