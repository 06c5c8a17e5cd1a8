"""Outcomes: values that say how a claim ended.

An outcome has the new status of the task and the values to write. It uses neither the database nor the task function. A
new kind of outcome is a new class here. Add it also to ``Outcome``, to ``_columns`` (settle.py), and to logs.py,
settler.py and metrics.py of the worker.
"""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from django_pglock.error_reading import class_path_of, describe_exception, function_of, message_of
from django_pglock.errors import EventTimeout, StepFailed
from django_pglock.tasks.states import TaskStatus
from django_pglock.tasks.step_records import Kind, Suspension


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The function returned; ``result`` is its value as JSON text."""

    result: str = "null"

    status = TaskStatus.SUCCESSFUL


#: The most common outcome: the function returned None.
SUCCEEDED = Succeeded()


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception, in the form in which it is stored with the attempt and passed to signal receivers."""

    exception_path: str
    traceback: str
    #: The exception on one line, for the log.
    message: str = ""
    exception: BaseException | None = field(default=None, compare=False, repr=False)
    #: The module and the function of the innermost frame of the project's own code.
    place: str = ""
    #: The name of the failed step that has led to it; empty: none has.
    step: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure for an exception."""
        step = ""
        for each in _chain_of(error):
            # Not by an assignment, which an exception that is a frozen dataclass refuses.
            each.with_traceback(_without_own_frames(each.__traceback__))
            if isinstance(each, (StepFailed, EventTimeout)):
                step = step or each.step
        return cls(*describe_exception(error), message_of(error), error, function_of(error.__traceback__), step)

    def clear_frames(self) -> None:
        """Free the objects of the frames, such as locks and connections."""
        for each in _chain_of(self.exception):
            traceback.clear_frames(each.__traceback__)

    def with_reason(self, reason: str) -> Failure:
        """Return the same failure with one more sentence, which says why it is final."""
        return replace(self, traceback=f"{self.traceback.rstrip()}\n{reason}\n", message=f"{self.message}. {reason}")


@dataclass(frozen=True, slots=True)
class Failed:
    """The function raised, and no attempt is left."""

    failure: Failure

    status = TaskStatus.FAILED


@dataclass(frozen=True, slots=True)
class Retried:
    """The function raised and runs again after ``delay`` seconds. This spends one retry."""

    failure: Failure
    delay: float

    status = TaskStatus.SCHEDULED


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The function raised ``Snooze``: it runs again after ``delay`` seconds. No attempt is counted.

    ``snoozes``: the number of snoozes so far, if it is limited; otherwise 0. ``suspension``: if the function has not
    raised ``Snooze``, but sleeps, or waits for an event or for its children (``tasks/steps.py``).
    """

    delay: float
    snoozes: int = 0
    suspension: Suspension | None = None

    status = TaskStatus.SCHEDULED

    @property
    def gather(self) -> Suspension | None:
        """The suspension, if it is for children: it is written by the transaction that enqueues these."""
        how = self.suspension
        return how if how is not None and how.kind is Kind.CHILDREN else None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The task ends without success: its function raised ``Cancel``, or a cancel was requested."""

    failure: Failure

    status = TaskStatus.CANCELLED


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The attempt was cut off, or the database refused a statement of ours. The function runs after ``delay`` seconds.

    This does not count as a retry. ``is_suspect``: the task itself may be the cause, so the settler asks for a verdict
    (``judge`` in rescue.py). ``rescued`` is 1 if the verdict was that it counts like the death of a worker.
    """

    failure: Failure
    delay: float
    is_suspect: bool = False
    rescued: int = 0

    status = TaskStatus.SCHEDULED


@dataclass(frozen=True, slots=True)
class GivenBack:
    """The claim is given back: the function did not run, or its transaction was rolled back with that of its group.

    No attempt, retry or rescue is counted.
    """

    status = TaskStatus.READY


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The process must end while the function runs, or has postponed the task. The task runs after ``delay`` seconds.

    Nothing is counted. If the process must end, the delay lasts until it has ended: without it the function could run
    twice at the same time. ``feeder.py`` says why a task is postponed.
    """

    delay: float

    status = TaskStatus.SCHEDULED


@dataclass(frozen=True, slots=True)
class Mixed:
    """The function of a group returned, and some of its calls have failed by themselves.

    It is not written: ``each`` has the outcome of each claim, in their order.
    """

    each: Sequence[Outcome]


Outcome = Succeeded | Failed | Retried | Snoozed | Cancelled | Interrupted | GivenBack | Abandoned
#: The outcome of a task that would run again if its cancel had not been requested meanwhile.
CANCEL_REQUESTED = Cancelled(
    Failure(
        "django_pglock.errors.TaskCancelled",
        "A cancel of this task was requested, so it does not run again.",
        "A cancel of this task was requested, so it does not run again",
    )
)
#: After these outcomes a task does not run again by itself.
FINAL = (Succeeded, Failed, Cancelled)

#: Python 3.10 has no groups.
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())
#: The first frames of each traceback belong to this package. They are removed: a reader does not need them, and the
#: variables of a frame that still runs cannot be cleared.
_OWN_FRAMES = ("django_pglock.worker.", "django_pglock.tasks.calls")


def readable(error: BaseException) -> BaseException:
    """Return an exception of users' code. If its attributes raise, return another exception, which names its class."""
    try:
        for each in _chain_of(error):
            # This reads an attribute, too.
            isinstance(each.with_traceback(each.__traceback__), OSError)
    except BaseException as broken:  # noqa: BLE001 - the code of the project
        why = f"{class_path_of(error)} cannot be read: its attributes raise {type(broken).__qualname__}."
        return TypeError(why).with_traceback(broken.__traceback__)
    return error


def _chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, its causes and contexts, and the exceptions of exception groups."""
    # Causes may be a circle: an exception can be the cause of its own cause.
    seen: set[int] = set()
    left: list[object] = [error]
    while left:
        each = left.pop()
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            left += [*(each.exceptions if isinstance(each, _GROUP) else ()), each.__cause__, each.__context__]


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    inner = trace
    while inner is not None and str(inner.tb_frame.f_globals.get("__name__")).startswith(_OWN_FRAMES):
        inner = inner.tb_next
    return trace if inner is None else inner
