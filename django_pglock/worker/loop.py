"""The loop of a process: one thread that waits for sockets and timers, and calls functions. No call may block."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from django_pglock.loggers import WORKER, get_logger

logger = get_logger(WORKER)

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
#: The longest wait in seconds. A signal may reach another thread, and then it does not wake this one.
LONGEST_WAIT = 1.0


class Timer:
    """A call that the loop makes later, unless it is cancelled."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Do not make the call."""
        self.call = None


class Loop:
    """Waits for sockets and timers until ``stop()``, and calls what was registered for them.

    All methods are for the loop's own thread, except ``call_soon()``, ``wake()`` and ``stop()``. An error of a call is
    logged, and the loop continues.
    """

    def __init__(self) -> None:
        # With their moments, and numbers in the order in which they were made.
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._is_stopped = False
        self._selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._ours, self._wakeup = socket.socketpair()
        for end in (self._ours, self._wakeup):
            end.setblocking(False)
        self.watch(self._ours, READ, self._drain)

    @property
    def wakeup_fd(self) -> int:
        """The descriptor that wakes the loop when a byte is written to it, for ``signal.set_wakeup_fd()``."""
        return self._wakeup.fileno()

    def watch(self, channel: Any, events: int, call: Callable[[], None]) -> None:
        """Call a function whenever a socket, or a descriptor, is ready for these events. Replaces an earlier watch."""
        try:
            self._selector.modify(channel, events, call)
        except KeyError:
            self._selector.register(channel, events, call)

    def unwatch(self, channel: Any) -> None:
        """Watch a socket no more. It may be closed already."""
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(channel)

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Call a function after some seconds."""
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), timer))
        return timer

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call a function in the loop's thread. For any thread."""
        self._calls.append(call)
        self.wake()

    def wake(self) -> None:
        """End the present wait."""
        # An error means that the buffer is full, so the loop wakes anyway, or that the loop is closed.
        with contextlib.suppress(OSError):
            self._wakeup.send(b"!")

    def stop(self) -> None:
        """End ``run()``."""
        self._is_stopped = True
        self.wake()

    def run(self) -> None:
        """Wait and call until ``stop()``."""
        while not self._is_stopped:
            self.run_once()

    def run_once(self) -> None:
        """Wait for the next event, and make all calls that are due."""
        for key, _ in self._selector.select(self._wait_for()):
            # Not if an earlier call of this turn has closed the socket, or watches it in another way now.
            if self._selector.get_map().get(key.fd) is key:
                self.call(key.data)
        while self._timers and self._timers[0][0] <= time.monotonic():
            self.call(heapq.heappop(self._timers)[2].call)
        for _ in range(len(self._calls)):
            self.call(self._calls.popleft())

    def call(self, call: Callable[[], None] | None) -> None:
        """Call a function now, and log its error."""
        try:
            if call is not None:
                call()
        except Exception:
            logger.exception("The worker met an error, and continues.")

    def close(self) -> None:
        """Close what the loop has opened."""
        self._selector.close()
        self._ours.close()
        self._wakeup.close()

    def _wait_for(self) -> float:
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        due = self._timers[0][0] if self._timers else math.inf
        return 0.0 if self._calls else max(0.0, min(LONGEST_WAIT, due - time.monotonic()))

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ours.recv(4096)
