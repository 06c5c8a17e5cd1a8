"""The failed and lost attempts of a task: rows of their own, or values of the row of the task in the archive.

The number of the last attempt is the number of claims without those that do not count as attempts: ``ATTEMPTS_MADE``.
In the statements of this folder it is ``attempts - uncounted``, and the models have it as ``attempts_made``.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.apps import apps
from django.conf import settings
from django.db.models import OuterRef, Subquery
from django.db.models.lookups import IsNull
from django.utils.dateparse import parse_datetime

from django_pglock.store.archived import is_archived, naive
from django_pglock.store.statements import rows_of

#: The number of the last attempt of a task, in a subquery of a query of tasks.
ATTEMPTS_MADE = OuterRef("attempts") - OuterRef("uncounted")


def last_ended_by(tasks: Any, exception_path: str) -> Any:
    """Return those of these tasks whose last attempt failed or was lost with this exception."""
    last = rows_of("Attempt", tasks.db).filter(task=OuterRef("pk"), number=ATTEMPTS_MADE, exception_path=exception_path)
    # A subquery instead of EXISTS, which is a join. If there were no attempts at the last ANALYZE, PostgreSQL would
    # read all attempts for each task.
    return tasks.filter(IsNull(Subquery(last.order_by().values("task")[:1]), False))


def attempts_before(using: str, task_id: int) -> list[Any]:
    """Return the rows of the failed and lost attempts of a task, in order."""
    return list(rows_of("Attempt", using).filter(task=task_id).order_by("number"))


def failures_of(row: Any) -> list[Any]:
    """Return the failed and lost attempts of a task's row, or of its row in the archive, in order.

    One statement for a row of the table of tasks, none for one of the archive.
    """
    using = row._state.db  # noqa: SLF001 - Django has no public name for it
    if not is_archived(row):
        # From the database of the row: a router may send reads to a replica, which does not have the attempts yet.
        return list(row.failures.using(using).order_by("number"))
    return [_attempt_of(using, row, values) for values in row.failed_attempts or ()]


def _attempt_of(using: str, row: Any, values: dict[str, Any]) -> Any:
    dates = {name: _date_of(using, values[name]) for name in ("started_at", "finished_at")}
    worker = values["worker"] and UUID(values["worker"])
    return apps.get_model("django_pglock", "Attempt")(task_id=row.pk, **{**values, **dates, "worker": worker})


def _date_of(using: str, text: str) -> Any:
    """Return a date of the JSON as Django reads it from a column."""
    found = parse_datetime(text)
    return found if settings.USE_TZ or found is None else naive(using, found)
