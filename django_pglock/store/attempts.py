"""The failed and lost attempts of a task.

The number of the last attempt is the number of claims without those that do not count as attempts: ``ATTEMPTS_MADE``.
In the statements of this folder it is ``attempts - uncounted``, and the models have it as ``attempts_made``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

from django.db.models import Aggregate, JSONField, OuterRef, Subquery
from django.db.models.functions import JSONObject
from django.db.models.lookups import IsNull

from django_pglock.store.statements import rows_of
from django_pglock.tasks import registry
from django_pglock.tasks.claim import date_of
from django_pglock.tasks.compat import TaskResult, TaskResultDoesNotExist
from django_pglock.tasks.options import task_ids
from django_pglock.tasks.results import as_called, error_of, make_result
from django_pglock.tasks.states import TaskStatus

#: The number of the last attempt of a task, in a subquery of a query of tasks.
ATTEMPTS_MADE = OuterRef("attempts") - OuterRef("uncounted")


def last_ended_by(tasks: Any, exception_path: str) -> Any:
    """Return those of these tasks whose last attempt failed or was lost with this exception."""
    last = rows_of("Attempt", tasks.db).filter(task=OuterRef("pk"), number=ATTEMPTS_MADE, exception_path=exception_path)
    # A subquery instead of EXISTS, which is a join. If there were no attempts at the last ANALYZE, PostgreSQL would
    # read all attempts for each task.
    return tasks.filter(IsNull(Subquery(last.order_by().values("task")[:1]), False))


def attempts_before(using: str, task_id: int) -> list[Any]:
    """Return the rows of the failed and lost attempts of a task, in order. One statement."""
    return list(rows_of("Attempt", using).filter(task=task_id).order_by("number"))


def failures_of(row: Any) -> list[Any]:
    """Return the failed and lost attempts of a task's row, in order. One statement."""
    # From the database of the row: a router may send reads to a replica, which does not have the attempts yet.
    return attempts_before(row._state.db, row.pk)  # noqa: SLF001 - Django has no public name for it


def results(using: str, ids: Iterable[TaskResult[..., Any] | str | int]) -> list[TaskResult[..., Any]]:
    """Return the results of these tasks, in the order of the ids, by one query.

    Raises ``TaskResultDoesNotExist`` if a task is missing, or if this process does not know its function.
    """
    return results_at_end(using, task_ids("ids", ids), {})


def results_at_end(using: str, ids: Sequence[int], ends: Mapping[str, Sequence[Any]]) -> list[TaskResult[..., Any]]:
    """Do the same, and return those tasks as they have once ended, of which ``ends`` says how.

    By their ids: the status, the number of the attempt, and the dates of the last attempt and of the end. Such a task
    may have been retried since.
    """
    # All attempts of a task are one value, so that there is no second query.
    fields = ("number", "exception_path", "traceback", "worker")
    own = rows_of("Attempt", using).filter(task=OuterRef("pk")).order_by().values("task")
    failures = own.annotate(
        all=Aggregate(JSONObject(**{name: name for name in fields}), function="jsonb_agg", output_field=JSONField())
    )
    tasks = rows_of("Task", using).annotate(all_failures=Subquery(failures.values("all"))).in_bulk(ids)
    return [_result_in(tasks, id_, ends.get(str(id_))) for id_ in ids]


def _result_in(tasks: dict[int, Any], number: int, end: Sequence[Any] | None) -> TaskResult[..., Any]:
    if (row := tasks.get(number)) is None:
        raise TaskResultDoesNotExist(
            f"There is no task {number}. Finished tasks are deleted after their keep_result, or by PRUNE_AFTER."
        )
    failures = sorted(row.all_failures or (), key=itemgetter("number"))
    if end is not None:
        row.status, row.attempts, *dates = end
        row.last_attempted_at, row.finished_at = map(date_of, dates)
        row.uncounted, row.worker, row.result = 0, None, None
        failures = [failure for failure in failures if failure["number"] <= row.attempts]
    result = result_of_row(row, [SimpleNamespace(**failure) for failure in failures])
    if result is None:
        raise TaskResultDoesNotExist(unknown_function(row))
    return result


def unknown_function(row: Any) -> str:
    """Return why the row of a task has no result in this process."""
    return f"Task {row.pk} calls {row.task_path}, which this process has not imported. Import its module first."


def result_of_row(row: Any, failures: list[Any] | None = None) -> TaskResult[..., Any] | None:
    """Return the ``TaskResult`` of a task's row, None if this process does not know its function.

    ``failures``: its failed attempts. None sends one query for them, unless the task cannot have any.
    """
    definition = registry.find(row.task_path)
    if definition is None:
        return None
    if failures is None:
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
