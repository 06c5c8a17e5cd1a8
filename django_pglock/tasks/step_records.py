"""What is recorded of steps, and how a function with steps is left."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from django_pglock.error_reading import describe_exception, message_of
from django_pglock.errors import TaskResultError
from django_pglock.tasks.arguments import from_json, to_json
from django_pglock.tasks.compat import TaskResult
from django_pglock.tasks.queues import check_text
from django_pglock.tasks.results import PostgresTaskError, make_result

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

R = TypeVar("R")

#: The name of the record that says since when. No step has it.
OF_OTHER_CODE = ""
#: Bytes of the result of a step or of an event's payload, characters of a name, and steps of a task.
LARGEST_RESULT, LONGEST_NAME, MOST_STEPS = 1024 * 1024, 200, 10_000


class Kind(str, Enum):
    """What a record is of."""

    STEP = "STEP"
    SLEEP = "SLEEP"
    EVENT = "EVENT"
    CHANGED = "CHANGED"
    CHUNKS = "CHUNKS"
    CHILDREN = "CHILDREN"


@dataclass(slots=True)
class Record:
    """What is recorded of a step. ``failure``: the path and the message of its exception."""

    number: int
    kind: str
    result: Any = None
    failure: dict[str, str] | None = None
    #: When it began, in seconds since the epoch by the server's clock.
    started_at: float = 0.0
    #: False: the task waits for an event, or waited when it was claimed.
    is_finished: bool = True


@dataclass(frozen=True, slots=True)
class TaskCall(Generic[R]):
    """One call of a task function that is not enqueued yet. Made by ``task.call_of(...)``, for ``context.gather()``."""

    task: TaskFields
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def here(self) -> TaskResult[..., R]:
        """Call the function in this thread, and return its result, or its exception, as a worker would store it."""
        value, errors = None, list[PostgresTaskError]()
        try:
            value = from_json(result_text(self.task.module_path, self.task.call(*self.args, **self.kwargs)))
        except Exception as error:  # noqa: BLE001 - a child may raise anything
            path, traceback = describe_exception(error)
            errors.append(PostgresTaskError(exception_class_path=path, traceback=traceback))
        status = "FAILED" if errors else "SUCCESSFUL"
        call = {"args": list(self.args), "kwargs": self.kwargs, "backend": self.task.backend}
        return make_result(self.task, id=0, status=status, errors=errors, return_value=value, enqueued_at=None, **call)


class StepEnded(BaseException):
    """Leaves a function whose step has raised, and will be tried again in the next attempt.

    Not an ``Exception``, so that no ``except Exception`` of the function runs on as if the step were over.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class HandedBack(BaseException):
    """Leaves a function before its next step, because its process has to end. Another one continues the task."""


class Suspension(BaseException):
    """Leaves a function that sleeps, or waits for an event or for its children. The task continues in a later run.

    ``seconds``: until then at most. ``calls``: the children to enqueue, each a task and its prepared call. ``awaited``:
    children that exist.
    """

    def __init__(
        self,
        name: str,
        kind: Kind,
        number: int,
        seconds: float = 0.0,
        event: str | None = None,
        calls: Sequence[tuple[TaskFields, Any]] = (),
        awaited: Sequence[int] = (),
    ) -> None:
        until = f"for its {len(calls) or len(awaited)} children" if kind is Kind.CHILDREN else f"for {seconds:.1f} s"
        super().__init__(f"the step {name!r} waits {f'for the event {event!r}' if event else until}")
        self.name, self.kind, self.number, self.seconds = name, kind, number, seconds
        self.event, self.calls, self.awaited = event, calls, awaited


def flaw_of_name(name: Any, what: str) -> str:
    """Return why a row cannot hold a name; an empty string if it can."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        return f"The name of the {what} is {name!r}; give a text of 1 to {LONGEST_NAME} characters."
    try:
        check_text(name, f"The name of the {what}")
    except ValueError as error:
        return str(error)
    return ""


def result_text(name: str, value: Any) -> str:
    """Return the result of a step as JSON. Raises ``TaskResultError``."""
    return to_json(value, what=f"The result of the step {name!r}", most=LARGEST_RESULT, kind=TaskResultError)


def told(error: Exception) -> dict[str, str]:
    """Return what is recorded of the exception of a step."""
    return {"path": describe_exception(error)[0], "message": message_of(error)}


def idempotency_key(task_id: int, enqueued_at: str, name: str) -> str:
    """Return a key that is the same in each attempt. Ids may come again after a failover, so the date is part of it."""
    return hashlib.sha256(f"{task_id} {enqueued_at} {name}".encode()).hexdigest()[:32]
