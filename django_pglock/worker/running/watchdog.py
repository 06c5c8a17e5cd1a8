"""The watchdog: stops functions whose time is over, and reports those that do not leave. ``stopping.py`` says how."""

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
#: Seconds between two attempts to stop a function whose time is over and that still runs.
BETWEEN_STOPS = 1.0


class Watchdog(Service):
    """Stops each function at its deadline, and again each second until it has ended.

    Its thread starts when there is a deadline for the first time. ``long_overdue`` is called once for each attempt that
    still runs ``grace_period`` seconds after its timeout.
    """

    name = "watchdog"

    def __init__(
        self,
        *,
        grace_period: float = math.inf,
        long_overdue: Callable[[StoppableAttempt], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self.grace_period = grace_period
        self.long_overdue = long_overdue
        self.task_threads: list[TaskThread] = []
        # The running attempts that have a deadline, and what stops each of them.
        self._watched: dict[StoppableAttempt, Callable[[StoppableAttempt], None]] = {}
        self._starting = threading.Lock()
        self._wakeup: SimpleQueue[None] = SimpleQueue()
        self._sleeps_until = math.inf

    def watch_this_thread(self) -> TaskThread:
        """Return what runs the functions of the current thread from now on."""
        thread = TaskThread(self)
        self.task_threads.append(thread)
        return thread

    def watch(self, attempt: StoppableAttempt, stop: Callable[[StoppableAttempt], None]) -> None:
        """Call ``stop`` at the deadline of an attempt, until ``forget()``."""
        self._ensure_started()
        attempt.check_at = attempt.deadline
        self._watched[attempt] = stop
        if attempt.deadline < self._sleeps_until:
            self.wake()

    def forget(self, attempt: StoppableAttempt) -> None:
        """Note that an attempt has ended."""
        self._watched.pop(attempt, None)

    @property
    def overdue(self) -> list[StoppableAttempt]:
        """The running attempts whose time is over."""
        return [attempt for attempt in list(self._watched) if attempt.is_overdue]

    def _ensure_started(self) -> None:
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self.start()

    def wake(self) -> None:
        self._wakeup.put(None)

    def run_once(self) -> None:
        # From here on, each watch() wakes the watchdog, until it is known how long the watchdog sleeps.
        self._sleeps_until = math.inf
        while not self._wakeup.empty():
            self._wakeup.get()
        for attempt, stop in list(self._watched.items()):
            if attempt.check_at <= time.monotonic():
                attempt.check_at = time.monotonic() + BETWEEN_STOPS
                stop(attempt)
                self._report(attempt)
        soonest = self._sleeps_until = min((each.check_at for each in list(self._watched)), default=math.inf)
        sleep = max(0.0, min(LONGEST_SLEEP, soonest - time.monotonic()))
        self.report_alive(sleep)
        with contextlib.suppress(Empty):
            self._wakeup.get(timeout=sleep)

    def _report(self, attempt: StoppableAttempt) -> None:
        is_late = time.monotonic() - attempt.deadline > self.grace_period
        if is_late and attempt in self._watched and not attempt.is_long_overdue:
            attempt.is_long_overdue = True
            self.long_overdue(attempt)
