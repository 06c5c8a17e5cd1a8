"""When and why a running attempt must stop: its task is cancelled, or its time is over."""

from __future__ import annotations

import math
import time
from typing import Any

from django_pglock.errors import TaskCancelled, TaskTimeout
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.flow import FlowWord


class StoppableAttempt:
    """The base class of an attempt: whether it must stop, and what was done to stop it so far."""

    claim: Claim
    #: The number of seconds that the function may take; None: any.
    timeout: float | None = None
    #: When the function was called, by time.monotonic().
    began: float | None = None
    #: When the time of the attempt is over, and when the watchdog checks it next, by time.monotonic().
    deadline = math.inf
    check_at = math.inf
    #: The function has ended. No exception may be sent into its thread any more.
    is_over = False
    #: TaskTimeout was sent into the thread, or CancelledError into the coroutine. It is sent only once.
    is_stop_sent = False
    #: The thread's sessions may have been left in the middle of a statement.
    is_disturbed = False
    #: It was logged that the function cannot be stopped.
    is_reported = False
    #: The function still runs ``grace_period`` seconds of the watchdog after its timeout. Its thread is given up.
    is_long_overdue = False

    @property
    def claims(self) -> list[Claim]:
        """The claims of this attempt."""
        return [self.claim]

    @property
    def is_cancelled(self) -> bool:
        """Whether the task is cancelled."""
        return self.claim.is_cancelled

    @property
    def is_overdue(self) -> bool:
        """Whether the time of the attempt is over."""
        return time.monotonic() >= self.deadline

    def begin(self) -> None:
        """Start the clock of the attempt. Raises ``TaskCancelled`` if the function must not be called."""
        if self.is_cancelled:
            raise TaskCancelled
        self.began = time.monotonic()
        if self.timeout is not None:
            self.deadline = self.began + self.timeout

    def call(self) -> Any:
        """Call the function."""
        raise NotImplementedError

    def reason_to_stop(self) -> Exception | None:
        """Return the exception for a function that checks whether it may continue; None: it may."""
        if self.is_cancelled:
            return TaskCancelled()
        return self.timed_out() if self.is_overdue else None

    def reason_of(self, error: BaseException) -> BaseException:
        """Return the error to record for an exception of the function.

        If the attempt had to stop, this is the reason for the stop, with the exception as its cause.
        """
        if self.claim.is_cancelled:
            reason: Exception | None = None if isinstance(error, TaskCancelled) else TaskCancelled()
        elif self.is_overdue:
            if self.is_stop_sent and type(error) is TaskTimeout and error.args == TaskTimeout().args:
                # Only a class can be sent into a thread, and no message.
                error.args = self.timed_out().args
            # The function may still decide how its task continues.
            reason = None if isinstance(error, TaskTimeout | FlowWord) else self.timed_out()
        else:
            reason = None
        if reason is None:
            return error
        reason.__cause__ = error
        return reason

    def timed_out(self) -> TaskTimeout:
        """Return the error of an attempt whose time is over."""
        return TaskTimeout(f"The attempt took longer than its timeout of {self.timeout:g} s.")
