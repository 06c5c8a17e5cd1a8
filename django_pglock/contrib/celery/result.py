"""What calls return: ``AsyncResult`` of a row, ``EagerResult`` of a call that ran at once, ``GroupResult`` of several.

The ids look like UUIDs, so that columns that have held those of Celery hold them: the digits of
``00000000-0000-0000-0000-000000001234`` are the number of the task 1234.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django_pglock.contrib.celery import states
from django_pglock.contrib.celery.exceptions import TaskRevokedError
from django_pglock.contrib.celery.values import decode
from django_pglock.errors import TaskError, model_of
from django_pglock.tasks.backends import database_of_tasks
from django_pglock.tasks.claim import running_claim
from django_pglock.tasks.compat import task_backends
from django_pglock.tasks.results import error_of

#: The name of the backend in ``TASKS`` that the bridge uses.
BACKEND = "default"


def celery_id(number: int | str) -> str:
    """Return the id that Celery's code sees for the number of a task."""
    return str(UUID(f"{int(number):032d}"))


def number_of(id_: Any) -> int:
    """Return the number of a task for its id; 0, which no task has, for an id of Celery itself."""
    digits = str(id_).replace("-", "")
    number = int(digits) if digits.isdecimal() else 0
    return number if number < 2**63 else 0


def rows(*ids: Any) -> Any:
    """Return the queryset of the rows of tasks with these ids."""
    database = database_of_tasks(BACKEND, option="TASKS")
    return model_of("Task").objects.using(database).filter(pk__in=map(number_of, ids))


class AsyncResult:
    """The result of a task, by its id. An id that no row has is PENDING, as in Celery."""

    def __init__(self, id: Any, parent: Any = None, **ignored: Any) -> None:  # noqa: A002 - Celery's name
        number = number_of(id)
        self.id = self.task_id = celery_id(number) if number else str(id)
        self.parent = parent

    def __str__(self) -> str:
        return self.id

    def __eq__(self, other: object) -> bool:
        return str(other) == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def _read(self) -> tuple[str, Any, str | None]:
        """Return the state, the value or the exception, and the traceback."""
        row = rows(self.id).first()
        if row is None:
            return states.PENDING, None, None
        return _unfinished(row) if row.finished_at is None else (states.OF_STATUS[row.status], *_ended(row))

    #: PENDING, STARTED, RETRY, SUCCESS, FAILURE or REVOKED; PROGRESS while it runs and has reported some.
    status = state = property(lambda self: self._read()[0])
    #: What the function has returned or raised; the progress of a running task; None if there is neither.
    result = info = property(lambda self: self._read()[1])
    traceback = property(lambda self: self._read()[2])

    def ready(self) -> bool:
        """Return whether the task has ended."""
        return self.status in states.READY_STATES

    def successful(self) -> bool:
        """Return whether the task has succeeded."""
        return bool(self.status == states.SUCCESS)

    def failed(self) -> bool:
        """Return whether the task has failed."""
        return bool(self.status == states.FAILURE)

    def get(self, timeout: float | None = None, propagate: bool = True, **ignored: Any) -> Any:
        """Wait for the end, ``timeout`` seconds at most, and return what the function has returned.

        Raises what the function has raised, or returns it without ``propagate``; ``TaskRevokedError`` for a cancelled
        task, and ``TimeoutError``, also if no other session sees the task.
        """
        self._wait(timeout)
        if propagate and isinstance(self.result, BaseException):
            raise self.result
        return self.result

    wait = get

    def _wait(self, timeout: float | None) -> None:
        if running_claim.get() is not None:
            raise RuntimeError("Never call result.get() within a task: all workers could wait like this. Use a chain.")
        backend: Any = task_backends[BACKEND]
        if not self.ready() and not backend.await_end(number_of(self.id), timeout):
            why = backend.why_unfinished(number_of(self.id)) or "no other session sees it"
            raise TimeoutError(f"Task {self.id} has not finished within {timeout} s: {why}.")

    def revoke(self, *args: Any, **ignored: Any) -> None:
        """Cancel the task: a waiting one does not run, and a running one is asked to stop."""
        rows(self.id).cancel()

    def forget(self) -> None:
        """Delete the row, if the task has ended."""
        rows(self.id).filter(finished_at__isnull=False).delete()


class EagerResult(AsyncResult):
    """The result of a call that ran in this process."""

    def __init__(self, id: str, value: Any, state: str, traceback: str | None = None) -> None:  # noqa: A002
        super().__init__(id)
        self._outcome = (state, value, traceback)

    def _read(self) -> tuple[str, Any, str | None]:
        return self._outcome

    def _wait(self, timeout: float | None) -> None:
        """Do nothing: it has ended."""


class GroupResult(list[Any]):
    """The results of a group, in order."""

    def __init__(self, results: Any = (), parent: Any = None) -> None:
        super().__init__(results)
        self.results = self
        self.parent = parent

    def ready(self) -> bool:
        """Return whether all have ended."""
        return all(each.ready() for each in self)

    def successful(self) -> bool:
        """Return whether all have succeeded."""
        return all(each.successful() for each in self)

    def completed_count(self) -> int:
        """Return how many have succeeded."""
        return sum(each.successful() for each in self)

    def get(self, timeout: float | None = None, propagate: bool = True, **ignored: Any) -> list[Any]:
        """Wait for all, each ``timeout`` seconds at most, and return their results. Raises the first error."""
        return [each.get(timeout, propagate) for each in self]

    join = get


def _unfinished(row: Any) -> tuple[str, Any, None]:
    if row.progress and row.status == "RUNNING":
        return states.PROGRESS, {"current": row.progress["done"], "total": row.progress["total"]}, None
    is_retried = row.status == "SCHEDULED" and row.retries
    return states.RETRY if is_retried else states.OF_STATUS.get(row.status, states.PENDING), None, None


def _ended(row: Any) -> tuple[Any, str | None]:
    """Return the value or the exception of a task that has ended, and the traceback. Its function may be unknown."""
    if row.status == "SUCCESSFUL":
        return decode(row.result), None
    last = row.failures.order_by("number").last()
    error: Any = _error_of(error_of(last), last.traceback.strip()) if last else "The task was cancelled."
    return TaskRevokedError(str(error)) if row.status == "CANCELLED" else error, last and last.traceback


def _error_of(failure: Any, text: str) -> BaseException:
    """Return the exception of a failed attempt: of its class if that is loaded and takes a message."""
    path = failure.exception_class_path
    # The last line of a traceback begins with the name of the class, and its module unless that is builtins.
    message = text.rpartition(f"{path.rpartition('.')[2]}: ")[2] if ": " in text else ""
    try:
        error: BaseException = failure.exception_class(message)
    except Exception:  # noqa: BLE001 - the class may be gone, or want other arguments
        return TaskError(f"{path}: {message}")
    return error


def ids_in(result: Any) -> Any:
    """Return the number of the task of a result, or the list of those of a group, which may be nested."""
    return [ids_in(each) for each in result] if isinstance(result, GroupResult) else number_of(result.id)


def flat(ids: Any) -> list[int]:
    """Return nested numbers as one list."""
    return [id_ for each in ids for id_ in flat(each)] if isinstance(ids, list) else [ids]


def values_of(ids: Any) -> Any:
    """Return the results of tasks that have succeeded, in the shape of their numbers.

    Raises ``LookupError`` if a row was deleted: it names the task and the setting.
    """
    found = dict(rows(*flat(ids)).values_list("pk", "result"))
    if missing := [id_ for id_ in flat(ids) if id_ not in found]:
        raise LookupError(f"The result of task {missing[0]} was deleted, see PRUNE_AFTER. This task needs it.")

    def shaped(part: Any) -> Any:
        return [shaped(each) for each in part] if isinstance(part, list) else decode(found[part])

    return shaped(ids)
