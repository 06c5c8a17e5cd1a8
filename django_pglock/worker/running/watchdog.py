"""The watchdog: stops sync functions whose time is over or whose task is cancelled. ``task_thread.py`` says how."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from django_pglock.worker.running.stoppable import StoppableAttempt
from django_pglock.worker.running.task_thread import TaskThread
from django_pglock.worker.service import Service

#: The longest sleep of the watchdog in seconds.
LONGEST_SLEEP = 3600.0


class Watchdog(Service):
    """Checks each function at its deadline, and at once when it is woken.

    Its thread starts when there is a deadline for the first time. A thread of the executor runs one function at a time,
    so there are never more deadlines than threads.

    ``long_overdue`` is called once for each attempt that still runs ``grace_period`` seconds after its timeout. It gets
    the attempt, and its stack as text.
    """

    name = "watchdog"

    def __init__(
        self,
        *,
        grace_period: float = math.inf,
        long_overdue: Callable[[StoppableAttempt, str], None] = lambda *_: None,
    ) -> None:
        super().__init__()
        self.grace_period = grace_period
        self.long_overdue = long_overdue
        self.task_threads: list[TaskThread] = []
        self._starting = threading.Lock()
        # Not an event or a condition, because their inner locks would stay locked if TaskTimeout were raised in them.
        self._wakeup: SimpleQueue[None] = SimpleQueue()
        self._sleeps_until = math.inf

    def watch_this_thread(self) -> TaskThread:
        """Watch the functions of the current thread from now on."""
        thread = TaskThread(self)
        self.task_threads.append(thread)
        return thread

    def ensure_started(self) -> None:
        """Start the thread, unless it has been started."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self.start()

    def expect(self, moment: float) -> None:
        """Check at this moment of time.monotonic(). May be called where TaskTimeout may be raised."""
        if moment < self._sleeps_until:
            self._wakeup.put(None)

    def wake(self) -> None:
        self._wakeup.put(None)

    def run_once(self) -> None:
        # From here on, each expect() wakes the watchdog, until it is known how long the watchdog sleeps.
        self._sleeps_until = math.inf
        while not self._wakeup.empty():
            self._wakeup.get()
        soonest = math.inf
        for thread in self.task_threads:
            if (attempt := thread.attempt) is not None and attempt.check_at <= time.monotonic():
                thread.stop(attempt)
            if attempt is not None:
                soonest = min(soonest, attempt.check_at)
        self._sleeps_until = soonest
        sleep = max(0.0, min(LONGEST_SLEEP, soonest - time.monotonic()))
        self.report_alive(sleep)
        with contextlib.suppress(Empty):
            self._wakeup.get(timeout=sleep)
