"""The watchdog: stops functions whose time is over, and reports those that do not leave. ``stopping.py`` says how."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from django_pglock.postgres.thread_stacks import stacks
from django_pglock.worker.child.stoppable import StoppableAttempt, outwards
from django_pglock.worker.child.task_thread import TaskThread

#: Seconds between two attempts to stop a function whose time is over and that still runs.
BETWEEN_STOPS = 1.0
#: The modules that debuggers of Python run in: pdb, ipdb and pudb in bdb, and those of editors in pydevd.
DEBUGGERS = ("bdb", "pydevd")


class Watchdog:
    """Stops each function at its deadline, and again each second until it has ended. The main thread calls ``check()``.

    ``changed`` is called when the next check may be due earlier, ``began`` and ``ended`` with an attempt that has a
    deadline, and ``long_overdue`` once for each attempt that still runs ``grace_period`` seconds after its deadline.
    The parent knows of these attempts, too: code in C may keep all threads of this process from running. If a person
    debugs the process when a deadline is over, ``debugged`` is called, and running attempts have no deadline any more.
    """

    def __init__(
        self,
        *,
        grace_period: float = math.inf,
        long_overdue: Callable[[StoppableAttempt], None] = lambda _: None,
        changed: Callable[[], None] = lambda: None,
        began: Callable[[StoppableAttempt], None] = lambda _: None,
        ended: Callable[[StoppableAttempt], None] = lambda _: None,
        debugged: Callable[[], None] = lambda: None,
    ) -> None:
        self.grace_period = grace_period
        self.long_overdue = long_overdue
        self.changed = changed
        self.began = began
        self.ended = ended
        self.debugged = debugged
        self.task_threads: list[TaskThread] = []
        # The running attempts that have a deadline, and what stops each of them.
        self._watched: dict[StoppableAttempt, Callable[[StoppableAttempt], None]] = {}
        self._sleeps_until = math.inf

    def watch_this_thread(self) -> TaskThread:
        """Return what runs the functions of the current thread from now on."""
        thread = TaskThread(self)
        self.task_threads.append(thread)
        return thread

    def watch(self, attempt: StoppableAttempt, stop: Callable[[StoppableAttempt], None]) -> None:
        """Call ``stop`` at the deadline of an attempt, until ``forget()``."""
        attempt.check_at = attempt.deadline
        self.began(attempt)
        self._watched[attempt] = stop
        if attempt.deadline < self._sleeps_until:
            self.changed()

    def forget(self, attempt: StoppableAttempt) -> None:
        """Note that an attempt has ended."""
        if self._watched.pop(attempt, None) is not None:
            self.ended(attempt)

    @property
    def overdue(self) -> list[StoppableAttempt]:
        """The running attempts whose time is over."""
        return [attempt for attempt in list(self._watched) if attempt.is_overdue]

    def check(self) -> float:
        """Stop what is overdue. Return the seconds until the next check."""
        # From here on, each watch() calls ``changed``, until it is known when the next check is due.
        self._sleeps_until = math.inf
        due = [each for each in list(self._watched.items()) if each[0].check_at <= time.monotonic()]
        if due and is_debugged():
            self.debugged()
            for attempt in list(self._watched):
                attempt.deadline = attempt.check_at = math.inf
        else:
            for attempt, stop in due:
                attempt.check_at = time.monotonic() + BETWEEN_STOPS
                stop(attempt)
                self._report(attempt)
        self._sleeps_until = min((each.check_at for each in list(self._watched)), default=math.inf)
        return max(0.0, self._sleeps_until - time.monotonic())

    def _report(self, attempt: StoppableAttempt) -> None:
        is_late = time.monotonic() - attempt.deadline > self.grace_period
        if is_late and attempt in self._watched and not attempt.is_long_overdue:
            attempt.is_long_overdue = True
            self.long_overdue(attempt)


def is_debugged() -> bool:
    """Return whether a person has stopped a thread of this process in a debugger."""
    with stacks() as innermost:
        frames = (frame for each in innermost.values() for frame in outwards(each))
        return any(str(frame.f_globals.get("__name__", "")).startswith(DEBUGGERS) for frame in frames)
