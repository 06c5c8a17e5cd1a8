"""When and why a running attempt must stop: its task is cancelled, or its time is over."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from itertools import dropwhile, islice
from traceback import StackSummary
from types import FrameType
from typing import Any

from django_pglock.error_reading import following, storable
from django_pglock.errors import TaskCancelled, TaskStopped, TaskTimeout
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.retry import FlowWord


class StoppableAttempt:
    """The base class of an attempt: whether it must stop, and what was done to stop it so far.

    No exception is sent into a thread from outside, because it could be raised between two lines that belong together,
    such as those that take a lock. The thread asks ``check()``: see ``stopping.py``.
    """

    claim: Claim
    #: The number of seconds that the function may take; None: any.
    timeout: float | None = None
    #: When the function was called, by time.monotonic().
    began: float | None = None
    #: When the time of the attempt is over, and when the watchdog checks it next, by time.monotonic().
    deadline = math.inf
    check_at = math.inf
    #: The function has ended.
    is_over = False
    #: CancelledError was sent into the coroutine of a cancelled task.
    is_cancel_sent = False
    #: The function still runs ``grace_period`` seconds of the watchdog after its timeout. Its process ends.
    is_long_overdue = False
    #: psycopg's connections whose sockets were shut down, because a cancel did not end their statements.
    shut_down: tuple[Any, ...] = ()

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
        # Most attempts have no deadline, and do not read the clock.
        return self.deadline < math.inf and time.monotonic() >= self.deadline

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

    def end(self) -> None:
        """Stop the clock: the function has ended. If that was in time, the deadline means nothing more."""
        if not self.is_overdue:
            self.deadline = math.inf
        self.is_over = True

    def check(self) -> None:
        """Raise ``TaskStopped`` if the function must end."""
        if (reason := self.reason_to_stop()) is not None:
            raise TaskStopped(reason)

    def refuse_late_success(self) -> None:
        """Raise ``TaskTimeout`` if the function has returned after its time. It is no success, whatever it returned."""
        if self.is_overdue:
            raise self.timed_out()

    def reason_to_stop(self) -> TaskTimeout | TaskCancelled | None:
        """Return the error for a function that checks whether it may continue; None: it may."""
        if self.is_cancelled:
            return TaskCancelled()
        return self.timed_out() if self.is_overdue else None

    def reason_of(self, error: BaseException) -> BaseException:
        """Return the error to record for an exception of the function.

        If the attempt had to stop, this is the reason for the stop, with the exception as its cause.
        """
        if type(error) is TaskStopped:
            error = reason_in(error)
        if self.claim.is_cancelled:
            reason: Exception | None = None if isinstance(error, TaskCancelled) else TaskCancelled()
        elif self.is_overdue:
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


def reason_in(stopped: TaskStopped) -> BaseException:
    """Return the reason for a stop, with the traceback of the stop, and as its cause what the stop has replaced."""
    reason = stopped.reason.with_traceback(stopped.__traceback__)
    reason.__cause__ = following(stopped)
    return reason


# The stack of a running task, as text: files, lines, functions and source lines, but no values of variables.
#
# Another thread reads the frames. It needs the GIL only for a moment, so it can read the stack of a function that
# computes in Python. If C code keeps the GIL, the stack is read when that code returns.


#: The number of innermost frames that are read of a stack, and of last characters of the text that are kept.
MOST_FRAMES, MOST_CHARACTERS = 200, 30_000
#: The modules of the outermost frames, which are the same for each task and are left out.
_WAY_TO_TASKS = ("threading", "concurrent.futures.thread", "asyncio.", "asgiref.", "django_pglock.worker.")


def stack_text(innermost: FrameType | None) -> str:
    """Return the stack of a thread as text, the most recent call last."""
    return _text(outwards(innermost))


def coroutine_text(coroutine: Any) -> str:
    """Return the stack of a suspended coroutine as text: the coroutine, the one that it awaits, and so on."""
    return _text(reversed(list(islice(_inwards(coroutine), MOST_FRAMES))))


def _text(frames: Iterable[FrameType]) -> str:
    """Return frames as text. The innermost frame comes first."""
    found = list(islice(frames, MOST_FRAMES))[::-1]
    own = list(dropwhile(_leads_to_task, found)) or found
    text = "".join(StackSummary.extract((frame, frame.f_lineno) for frame in own).format())
    return storable(text)[-MOST_CHARACTERS:]


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, the frame that has called it, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _inwards(coroutine: Any) -> Iterator[FrameType]:
    # asyncio's own Task.get_stack() ends at the outermost coroutine.
    while coroutine is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(coroutine, f"{kind}_frame")), None)
        frame = kind and getattr(coroutine, f"{kind}_frame")
        if not frame:
            return
        yield frame
        coroutine = getattr(coroutine, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


def _leads_to_task(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_WAY_TO_TASKS)
