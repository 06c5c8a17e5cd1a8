"""Finds tasks in the archive that are no longer in the table of tasks.

A task moves from the table of tasks to the archive, by one transaction, and never back. So a caller that asks the table
first and then the archive misses no task.
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

# Which of these tasks are in the archive.
ARE_ARCHIVED = "SELECT id FROM {archived_task} WHERE id = ANY (%s::bigint[])"


def find_archived(using: str, task_id: int, **wanted: Any) -> Any:
    """Return the row of a task in the archive, None if it is not there. ``wanted`` are values of its columns.

    Ask for it when the task is not in the table of tasks. One statement; none if this process knows that the archive
    is not in use.
    """
    if not may_be_archived(using):
        return None
    return rows_of("ArchivedTask", using).filter(pk=task_id, **wanted).order_by().first()


def archived_among(using: str, ids: Collection[int]) -> set[int]:
    """Return those of these tasks that are in the archive: tasks that have succeeded."""
    if not ids or not may_be_archived(using):
        return set()
    return {id_ for (id_,) in run(using, ARE_ARCHIVED, array_of_numbers(ids))}


def bounds_of_day(using: str, day: date) -> tuple[datetime, datetime]:
    """Return the first moment of a day, by UTC, and that of the next day, as a filter of a queryset takes them."""
    start, end = bounds_of(day)
    return (start, end) if settings.USE_TZ else (naive(using, start), naive(using, end))


def is_archived(row: Any) -> bool:
    """Say whether this is a row of the archive."""
    return bool(row._meta.model_name == "archivedtask")


def naive(using: str, moment: datetime) -> datetime:
    """Return a moment as Django reads it from a column without USE_TZ."""
    return make_naive(moment, connections[using].timezone)
