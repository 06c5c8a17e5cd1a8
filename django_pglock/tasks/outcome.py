"""What came of a claim, as values. A new ending is a new class here, not a new branch in three places.

An outcome knows which status it leads to and what it writes; it knows neither the database nor the user's function.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """An exception, as it is stored with the attempt."""

    exception_path: str
    traceback: str


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
    """The function asked to be run again after ``delay`` seconds. Nothing is counted."""

    delay: float

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
    Failure("django_pglock.errors.TaskCancelled", "Somebody asked this task to end, so it does not run again.")
)
#: After these nothing more happens by itself.
FINAL = (Succeeded, Failed, Cancelled)
