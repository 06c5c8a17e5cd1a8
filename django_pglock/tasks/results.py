"""``TaskResult`` objects of django.tasks, made from rows and claims."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django_pglock.tasks import registry
from django_pglock.tasks.compat import InvalidTask, Task, TaskError, TaskResult, TaskResultStatus
from django_pglock.tasks.states import TaskStatus

if TYPE_CHECKING:
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
) -> TaskResult[..., Any]:
    """Return a ``TaskResult`` for one call of ``task``; ``status`` is a value of our ``TaskStatus``."""
    result: TaskResult[..., Any] = TaskResult(
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
    if row.worker is not None and (not failures or failures[-1].number != row.attempts):
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
    return TaskError(exception_class_path=failure.exception_path, traceback=failure.traceback)
