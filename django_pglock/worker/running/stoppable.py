"""What somebody may want of a running attempt: that it ends, because it is cancelled or its time is over."""

from __future__ import annotations

import math
import time

from django_pglock.errors import TaskCancelled, TaskTimeout
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.flow import FlowWord


class Interruptible:
    """The base of an attempt: whether it is to end, and what has been done about it."""

    claim: Claim
    #: How many seconds the function may take.
    timeout: float | None = None
    #: When its function was called, by time.monotonic().
    began: float | None = None
    #: When its time is over, and when the watchdog is to look at it next, by time.monotonic().
    deadline = math.inf
    look_at = math.inf
    #: Its function has ended. Nothing may reach its thread any more.
    is_over = False
    #: TaskTimeout was sent into the thread, or CancelledError into the coroutine: once is enough.
    is_struck = False
    #: The thread's sessions may have been left in the middle of something.
    is_disturbed = False
    #: The log has said that it cannot be stopped.
    is_reported = False
    #: It has not ended for so long that its thread is given up.
    is_stuck = False

    @property
    def claims(self) -> list[Claim]:
        """The claims that this attempt stands for."""
        return [self.claim]

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody asked for its end."""
        return self.claim.is_cancelled

    @property
    def is_overdue(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() >= self.deadline

    def begin(self) -> None:
        """Let its time begin. Raises ``TaskCancelled`` if the function shall not begin."""
        if self.is_cancelled:
            raise TaskCancelled
        self.began = time.monotonic()
        if self.timeout is not None:
            self.deadline = self.began + self.timeout

    def reason_to_stop(self) -> Exception | None:
        """Return what to raise in a function that asks whether it shall go on."""
        if self.is_cancelled:
            return TaskCancelled()
        return self.timed_out() if self.is_overdue else None

    def reason_of(self, error: BaseException) -> BaseException:
        """Return what an exception of the function stands for: after it was to end, for that, whatever it is."""
        if self.claim.is_cancelled:
            reason: Exception | None = None if isinstance(error, TaskCancelled) else TaskCancelled()
        elif self.is_overdue:
            # A function may still say how its task goes on.
            reason = None if isinstance(error, TaskTimeout | FlowWord) else self.timed_out()
        else:
            reason = None
        if reason is None:
            return error
        reason.__cause__ = error
        return reason

    def timed_out(self) -> TaskTimeout:
        """Return what ends an attempt whose time is over."""
        return TaskTimeout(f"The attempt took longer than its timeout of {self.timeout:g} s.")
