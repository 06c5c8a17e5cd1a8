"""``TaskResult`` objects of django.tasks, made from values."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.utils.asyncio import async_unsafe

from django_pglock import errors
from django_pglock.tasks.compat import (
    InvalidTask,
    Task,
    TaskError,
    TaskResult,
    TaskResultStatus,
    task_backends,
)
from django_pglock.tasks.states import TaskStatus

if TYPE_CHECKING:
    from typing_extensions import Self

    from django_pglock.tasks.fields import TaskFields

#: django.tasks knows four states. Each other state of ours is shown as the nearest of these.
PUBLIC_STATUS = {
    status: TaskResultStatus(status.value) for status in TaskStatus if status in TaskResultStatus.values
} | {
    TaskStatus.SCHEDULED: TaskResultStatus.READY,
    TaskStatus.BLOCKED: TaskResultStatus.READY,
    TaskStatus.CANCELLED: TaskResultStatus.FAILED,
}


class PostgresTaskError(TaskError):
    """A failed attempt."""

    @property
    def exception_class(self) -> type[BaseException]:
        """The class of the exception, if its module is loaded.

        Django would import the path that is in the row. Raises ``ImportError`` if the module is not loaded, and
        ``ValueError`` if the path is that of something else than an exception.
        """
        module, _, name = self.exception_class_path.rpartition(".")
        found = getattr(sys.modules.get(module), name, None)
        if found is None:
            raise ImportError(f"{self.exception_class_path!r} is not imported, and reading a result imports nothing.")
        if not isinstance(found, type) or not issubclass(found, BaseException):
            raise ValueError(f"{self.exception_class_path!r} is not an exception class.")  # noqa: TRY004 - as Django does
        return found


class PostgresTaskResult(TaskResult):  # type: ignore[type-arg]
    """A ``TaskResult`` that can be waited for."""

    def __repr__(self) -> str:
        # Without the arguments, because this is written to logs and error reports.
        return f"<TaskResult {self.id} of {self.task.module_path} {self.status}>"

    @async_unsafe("result.wait() blocks the event loop here. Write: await result.await_(…)")
    def wait(self, timeout: float | None = None) -> Self:
        """Wait until the task is finished, for ``timeout`` seconds at most (None: as long as it takes).

        Returns this result, refreshed: ``result.wait(10).return_value``. Raises ``TimeoutError``, with the reason if
        the database has one, and ``TaskError`` inside ``atomic()``. Waits for a notification. In addition, one
        statement for all waiting callers of the process polls every ``POLL_INTERVAL`` seconds. These callers share one
        session for each database.
        """
        for left in _seconds_left(timeout):
            is_there = self._backend.await_end(int(self.id), left)
            if is_there is None:
                raise self._timed_out(timeout, self._backend.why_unfinished(int(self.id)))
            self.refresh()
            if self._has_ended(is_there):
                break
        return self

    async def await_(self, timeout: float | None = None) -> Self:
        """Do the same as ``wait()``, in a coroutine. It occupies no thread while it waits."""
        for left in _seconds_left(timeout):
            is_there = await self._backend.await_end_async(int(self.id), left)
            if is_there is None:
                raise self._timed_out(timeout, await sync_to_async(self._backend.why_unfinished)(int(self.id)))
            await self.arefresh()
            if self._has_ended(is_there):
                break
        return self

    @property
    def _backend(self) -> Any:
        return task_backends[self.backend]

    def _timed_out(self, timeout: float | None, why: str) -> TimeoutError:
        return TimeoutError(f"Task {self.id} has not finished within {timeout} s{': ' if why else ''}{why}.")

    def _has_ended(self, is_there: bool) -> bool:
        """Return whether the wait is over. It is not if the task was retried meanwhile."""
        if not is_there and not self.is_finished:
            # The session of the wait cannot see the task, so the task exists only in this transaction.
            raise errors.TaskError(
                f"wait() for task {self.id} inside the transaction of a TestCase would wait forever: no worker sees "
                "the task. Call django_pglock.testing.run_tasks(), and then result.refresh()."
            )
        return self.is_finished


def _seconds_left(timeout: float | None) -> Iterator[float | None]:
    """Yield the seconds that are left of a timeout, again and again; None without one."""
    began = time.monotonic()
    while True:
        yield None if timeout is None else max(0.0, began + timeout - time.monotonic())


def make_result(
    task: Task[..., Any],
    *,
    id: int,  # noqa: A002 - the word of TaskResult
    status: str,
    errors: Iterable[TaskError] = (),
    worker_ids: Iterable[str] = (),
    return_value: Any = None,
    **others: Any,
) -> PostgresTaskResult:
    """Return a ``TaskResult`` for one call of ``task``; ``status`` is a value of our ``TaskStatus``.

    ``others`` are fields of ``TaskResult``: the arguments, the backend and the dates. A date may be left out.
    """
    result = PostgresTaskResult(
        task=task,
        id=str(id),
        status=PUBLIC_STATUS[TaskStatus(status)],
        errors=list(errors),
        worker_ids=list(worker_ids),
        **{"started_at": None, "last_attempted_at": None, "finished_at": None, **others},
    )
    if return_value is not None:
        object.__setattr__(result, "_return_value", return_value)
    return result


def as_called(definition: TaskFields, **options: Any) -> TaskFields:
    """Return the definition with the options of one call, or without them if the settings no longer allow these."""
    if all(getattr(definition, name) == value for name, value in options.items()):
        return definition
    try:
        return replace(definition, **options)
    except InvalidTask:
        # For example, the queue was removed from QUEUES since then. Its tasks still have results.
        return definition


def error_of(failure: Any) -> TaskError:
    """Return a failed attempt as a ``TaskError`` of django.tasks."""
    return PostgresTaskError(exception_class_path=failure.exception_path, traceback=failure.traceback)
