"""What came of a claim, as values. A new ending is a new class here, not a new branch in three places.

An outcome knows which status it leads to and what it writes; it knows neither the database nor the user's function.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType

from django_pglock.tasks.arguments import describe_exception, message_of
from django_pglock.tasks.states import TaskStatus


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The function returned; ``result`` is its value as JSON text."""

    result: str = "null"

    status = TaskStatus.SUCCESSFUL


#: The most common ending: the function returned None.
SUCCEEDED = Succeeded()


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception, as it is stored with the attempt, and as those get it who are told of the end."""

    exception_path: str
    traceback: str
    #: The exception on one line, for the log.
    message: str = ""
    exception: BaseException | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure that an exception is."""
        chain = list(_chain_of(error))
        for each in chain:
            each.__traceback__ = _without_own_frames(each.__traceback__)
        failure = cls(*describe_exception(error), message_of(error), error)
        for each in chain:
            # What the frames hold, such as locks and connections, is let go: the next task may begin now.
            traceback.clear_frames(each.__traceback__)
        return failure


@dataclass(frozen=True, slots=True)
class Failed:
    """The function raised, and no attempt is left."""

    failure: Failure

    status = TaskStatus.FAILED


@dataclass(frozen=True, slots=True)
class Retried:
    """The function raised and will be tried again after ``delay`` seconds. Spends one retry."""

    failure: Failure
    delay: float

    status = TaskStatus.SCHEDULED


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The function asked to be run again after ``delay`` seconds. No attempt is counted.

    ``snoozes`` is how often it has asked so far, where that is limited; else 0.
    """

    delay: float
    snoozes: int = 0

    status = TaskStatus.SCHEDULED


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The task is not wanted any more: its function said so, or somebody asked for its end."""

    failure: Failure

    status = TaskStatus.CANCELLED


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The function was cut off from the database in its own transaction, or met a server that only reads: run it again.

    After ``delay`` seconds, for whatever cut it off may still be there. Counts neither as a retry nor as a rescue: an
    outage is the fault of no task.
    """

    failure: Failure
    delay: float

    status = TaskStatus.SCHEDULED


@dataclass(frozen=True, slots=True)
class Released:
    """The claim is given back unused: nothing ran, so nothing is counted."""

    status = TaskStatus.READY


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The process has to end while the function still runs: run it again after ``delay`` seconds. Nothing is counted.

    Not at once, for until the process is gone the function would run twice.
    """

    delay: float

    status = TaskStatus.SCHEDULED


Outcome = Succeeded | Failed | Retried | Snoozed | Cancelled | Interrupted | Released | Abandoned
#: What was given back or would have been tried again, if nobody had asked for its end meanwhile.
NOT_AGAIN = Cancelled(
    Failure(
        "django_pglock.errors.TaskCancelled",
        "Somebody asked this task to end, so it does not run again.",
        "Somebody asked this task to end, so it does not run again",
    )
)
#: After these nothing more happens by itself.
FINAL = (Succeeded, Failed, Cancelled)

#: Where the frames are through which every exception of a task comes. They tell nobody anything, and one that runs
#: keeps its variables.
_OWN_FRAMES = "django_pglock.worker."


def _chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, and those from which it came or that it groups."""
    seen: set[int] = set()
    left: list[object] = [error]
    while left:
        each = left.pop()
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            left += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    inner = trace
    while inner is not None and inner.tb_frame.f_globals.get("__name__", "").startswith(_OWN_FRAMES):
        inner = inner.tb_next
    return trace if inner is None else inner
