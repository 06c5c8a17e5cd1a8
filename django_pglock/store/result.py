"""Reads a task's row as a ``TaskResult`` of django.tasks."""

from __future__ import annotations

from typing import Any

from django_pglock.store.attempts import failures_of
from django_pglock.tasks import registry
from django_pglock.tasks.compat import TaskResult
from django_pglock.tasks.results import as_called, error_of, make_result
from django_pglock.tasks.states import TaskStatus


def result_of_row(row: Any) -> TaskResult[..., Any] | None:
    """Return the ``TaskResult`` of a task's row, None if this process does not know its function.

    Sends one query for the failed attempts, unless the task cannot have any.
    """
    definition = registry.find(row.task_path)
    if definition is None:
        return None
    may_have_failed = row.attempts or row.status == TaskStatus.CANCELLED
    failures = failures_of(row) if may_have_failed else []
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
