"""Delayed calls, in one thread for all of them. It starts with the first call.

It is a thread and not an event loop: if gevent has replaced threads by greenlets, and one greenlet ran an event loop,
Django would treat all greenlets as coroutines.
"""

from __future__ import annotations

import heapq
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from django_pglock.loggers import get_logger

logger = get_logger("django_pglock.locks")


class Timer:
    """A future call. ``cancel`` is thread-safe."""

    def __init__(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._call: tuple[Callable[..., None], tuple[Any, ...]] | None = (function, args)

    @property
    def is_cancelled(self) -> bool:
        """Whether the call was executed or cancelled."""
        return self._call is None

    def run(self) -> None:
        """Call the function, unless the timer is cancelled."""
        call, self._call = self._call, None
        if call is not None:
            function, args = call
            function(*args)

    def cancel(self) -> None:
        """Drop the call and its arguments."""
        self._call = None


class TimerThread:
    """The timers of a process and their thread."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._numbers = itertools.count()
        self._all: list[tuple[float, int, Timer]] = []
        self._thread: threading.Thread | None = None

    def add(self, seconds: float, function: Callable[..., None], *args: Any) -> Timer:
        """Call a function after ``seconds``, unless its timer is cancelled."""
        timer = Timer(function, args)
        with self._change:
            if len(self._all) > COMPACT_ABOVE and len(self._all) > 2 * sum(
                not each.is_cancelled for _, _, each in self._all
            ):
                self._all = [each for each in self._all if not each[2].is_cancelled]
                heapq.heapify(self._all)
            heapq.heappush(self._all, (time.monotonic() + seconds, next(self._numbers), timer))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="django_pglock timer", daemon=True)
                self._thread.start()
            elif self._all[0][2] is timer:
                self._change.notify()
        return timer

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._all or (left := self._all[0][0] - time.monotonic()) > 0:
                    self._change.wait(left if self._all else None)
                _, _, timer = heapq.heappop(self._all)
            try:
                timer.run()
            except BaseException:
                # The calls of other timers must run.
                logger.exception("A delayed call of django_pglock has failed.")


#: At this number of timers, the cancelled ones are removed.
COMPACT_ABOVE = 1000
_timers = TimerThread()


def call_later(seconds: float, function: Callable[..., None], *args: Any) -> Timer:
    """Call a function in another thread after ``seconds``, unless the returned timer is cancelled."""
    return _timers.add(seconds, function, *args)


def _reset_after_fork() -> None:
    # The thread does not exist in this process, and its timers belong to the parent.
    global _timers
    _timers = TimerThread()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
