"""Finds tasks in the archive that are no longer in the table of tasks.

A move to the archive is one transaction, and so is a move back (restore.py). A caller that has not found a task in the
table looks into the archive, and then once more into the table, or into both by one statement. So it misses no task.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import date, datetime
from typing import Any

from django.conf import settings
from django.db import connections
from django.utils.timezone import make_naive

from django_pglock.store.archive_state import bounds_of, may_be_archived
from django_pglock.store.statements import array_of_numbers, rows_of, run
from django_pglock.store.unreadable import first_row

# Which of these tasks are in the archive.
ARE_ARCHIVED = "SELECT id FROM {archived_task} WHERE id = ANY (%s::bigint[])"
# Which of these tasks are in the archive, or have been moved back from there.
HAVE_SUCCEEDED = f"""
{ARE_ARCHIVED} UNION ALL
SELECT id FROM {{task}} WHERE id = ANY (%s::bigint[]) AND status || '' = 'SUCCESSFUL'
"""


def find_archived(using: str, task_id: int, **wanted: Any) -> Any:
    """Return the row of a task in the archive, or of a task that was moved back from there just now; else None.

    ``wanted`` are values of its columns. Call it after the table of tasks did not have the task. Sends one statement,
    two if there is no such task, or none while the cached state says that the archive is not in use.
    """
    if not may_be_archived(using):
        return None
    for model in ("ArchivedTask", "Task"):
        row = first_row(rows_of(model, using).filter(pk=task_id, **wanted).order_by())
        if row is not None:
            return row
    return None


def archived_among(using: str, ids: Collection[int]) -> set[int]:
    """Return the ids of these tasks that are in the archive. All archived tasks have succeeded."""
    if not ids or not may_be_archived(using):
        return set()
    return {id_ for (id_,) in run(using, ARE_ARCHIVED, array_of_numbers(ids))}


def succeeded_among(using: str, ids: Collection[int]) -> set[int]:
    """Return which of these tasks have succeeded. The table of tasks did not have them before this call.

    All archived tasks have succeeded. So these are the tasks in the archive, and those that have just been moved
    back.
    """
    if not ids or not may_be_archived(using):
        return set()
    return {id_ for (id_,) in run(using, HAVE_SUCCEEDED, *[array_of_numbers(ids)] * 2)}


def bounds_of_day(using: str, day: date) -> tuple[datetime, datetime]:
    """Return the first moment of a day, by UTC, and that of the next day, as a filter of a queryset takes them."""
    start, end = bounds_of(day)
    return (start, end) if settings.USE_TZ else (naive(using, start), naive(using, end))


def is_archived(row: Any) -> bool:
    """Return whether this is a row of the archive."""
    return bool(row._meta.model_name == "archivedtask")


def naive(using: str, moment: datetime) -> datetime:
    """Return a moment as Django reads it from a column without USE_TZ."""
    return make_naive(moment, connections[using].timezone)
