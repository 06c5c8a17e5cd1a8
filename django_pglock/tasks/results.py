"""``TaskResult`` objects of django.tasks, made from rows and claims."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.db import DEFAULT_DB_ALIAS, connections

from django_pglock import errors
from django_pglock.tasks import registry
from django_pglock.tasks.await_result import await_end
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

    from django_pglock.tasks.definition import PostgresTask

#: django.tasks knows four states; ours that it does not know read as the nearest one.
PUBLIC_STATUS = {
    TaskStatus.SCHEDULED: TaskResultStatus.READY,
    TaskStatus.BLOCKED: TaskResultStatus.READY,
    TaskStatus.READY: TaskResultStatus.READY,
    TaskStatus.RUNNING: TaskResultStatus.RUNNING,
    TaskStatus.SUCCESSFUL: TaskResultStatus.SUCCESSFUL,
    TaskStatus.FAILED: TaskResultStatus.FAILED,
    TaskStatus.CANCELLED: TaskResultStatus.FAILED,
}


class PostgresTaskError(TaskError):
    """A failed attempt."""

    @property
    def exception_class(self) -> type[BaseException]:
        """The class of the exception, if its module is loaded.

        Django would import what the row names. Raises ``ImportError`` where it is not loaded, and ``ValueError`` for
        what is no exception.
        """
        module, _, name = self.exception_class_path.rpartition(".")
        found = getattr(sys.modules.get(module), name, None)
        if found is None:
            raise ImportError(f"{self.exception_class_path!r} is not loaded, and nothing is imported for a task's row.")
        if not isinstance(found, type) or not issubclass(found, BaseException):
            raise ValueError(f"{self.exception_class_path!r} is no exception.")  # noqa: TRY004 - as Django does
        return found


class PostgresTaskResult(TaskResult):  # type: ignore[type-arg]
    """A ``TaskResult`` that can be waited for."""

    def __repr__(self) -> str:
        # Without the arguments: this stands in logs and error reports.
        return f"<TaskResult {self.id} of {self.task.module_path} {self.status}>"

    def wait(self, timeout: float | None = None) -> Self:
        """Wait until the task is finished, for ``timeout`` seconds at most (None: as long as it takes).

        Returns this result, refreshed: ``result.wait(10).return_value``. Raises ``TimeoutError``, and ``TaskError``
        inside ``atomic()``. Does not poll; takes one database session for as long as it waits.
        """
        return self._wait(timeout, is_wanted=lambda: True)

    async def await_(self, timeout: float | None = None) -> Self:
        """Do as ``wait()`` without blocking the event loop."""
        is_wanted = True
        try:
            wait = sync_to_async(self._wait, thread_sensitive=False)
            return await wait(timeout, is_wanted=lambda: is_wanted)
        finally:
            is_wanted = False

    def _wait(self, timeout: float | None, *, is_wanted: Callable[[], bool]) -> Self:
        using = getattr(task_backends[self.backend], "database", DEFAULT_DB_ALIAS)
        try:
            is_finished = await_end(self.id, using, timeout, is_wanted=is_wanted)
        finally:
            _close_in_thread()
        if not is_finished:
            raise TimeoutError(f"Task {self.id} has not finished within {timeout} s.")
        self.refresh()
        if not self.is_finished:
            # Gone, as the session that waited saw it; so it is here only.
            raise errors.TaskError(
                f"wait() for task {self.id} inside the transaction of a TestCase would wait for ever: no worker sees "
                "the task. Use a TransactionTestCase, with a worker."
            )
        return self


def _close_in_thread() -> None:
    # A thread of asyncio's pool belongs to nobody who would close its connections.
    if threading.current_thread().name.startswith("asyncio"):
        connections.close_all()


def make_result(
    task: Task[..., Any],
    *,
    id: int,  # noqa: A002 - the word of TaskResult
    status: str,
    args: list[Any],
    kwargs: dict[str, Any],
    backend: str,
    enqueued_at: datetime | None,
    started_at: datetime | None = None,
    last_attempted_at: datetime | None = None,
    finished_at: datetime | None = None,
    errors: Iterable[TaskError] = (),
    worker_ids: Iterable[str] = (),
    return_value: Any = None,
) -> PostgresTaskResult:
    """Return a ``TaskResult`` for one call of ``task``; ``status`` is a value of our ``TaskStatus``."""
    result = PostgresTaskResult(
        task=task,
        id=str(id),
        status=PUBLIC_STATUS[TaskStatus(status)],
        enqueued_at=enqueued_at,
        started_at=started_at,
        finished_at=finished_at,
        last_attempted_at=last_attempted_at,
        args=args,
        kwargs=kwargs,
        backend=backend,
        errors=list(errors),
        worker_ids=list(worker_ids),
    )
    if return_value is not None:
        object.__setattr__(result, "_return_value", return_value)
    return result


def result_of_row(row: Any) -> TaskResult[..., Any] | None:
    """Return the ``TaskResult`` of a task's row, or None when its function is not known to this process.

    Costs one more query, for the attempts that failed, unless there cannot be any.
    """
    definition = registry.find(row.task_path)
    if definition is None:
        return None
    failures = list(row.failures.order_by("number")) if row.attempts or row.status == TaskStatus.CANCELLED else []
    workers = [str(failure.worker) for failure in failures if failure.worker is not None]
    if row.worker is not None and (not failures or failures[-1].number != row.attempts_made):
        workers.append(str(row.worker))
    return make_result(
        as_called(
            definition,
            priority=row.priority,
            queue_name=row.queue,
            run_after=row.run_after,
            max_attempts=row.max_retries + 1,
        ),
        id=row.pk,
        status=row.status,
        args=row.args,
        kwargs=row.kwargs,
        backend=row.backend,
        enqueued_at=row.enqueued_at,
        started_at=row.started_at,
        last_attempted_at=row.last_attempted_at,
        finished_at=row.finished_at,
        errors=map(error_of, failures),
        worker_ids=workers,
        return_value=row.result,
    )


def as_called(definition: PostgresTask, **options: Any) -> PostgresTask:
    """Return the definition with the options of one call; without them when the settings no longer allow those."""
    if all(getattr(definition, name) == value for name, value in options.items()):
        return definition
    try:
        return replace(definition, **options)
    except InvalidTask:
        # A queue that was taken out of QUEUES since: its tasks still have results.
        return definition


def error_of(failure: Any) -> TaskError:
    """Return a failed attempt in the words of django.tasks."""
    return PostgresTaskError(exception_class_path=failure.exception_path, traceback=failure.traceback)
