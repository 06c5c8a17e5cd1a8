"""Deletes finished tasks at the request of a person, whatever their age, also in the archive."""

from __future__ import annotations

from typing import Any

from django_pglock.postgres.connections import transaction_block
from django_pglock.store.archive_state import may_be_archived
from django_pglock.store.prune import delete_free, unneeded
from django_pglock.store.refusals import Refusals
from django_pglock.store.statements import rows_of
from django_pglock.store.windows import Progress, by_windows
from django_pglock.tasks.states import FINISHED


def delete(tasks: Any, *, progress: Progress | None = None) -> int:
    """Delete finished tasks with their attempts. Returns how many.

    A task stays if others wait for it, if its unique key is taken for a period, or if the database refuses it.
    """
    refusals = Refusals()

    def delete_window(tasks: Any) -> int:
        return refusals.delete(delete_free, deletable(tasks))

    count = by_windows(tasks, tasks.filter(status__in=sorted(FINISHED)).order_by("pk"), delete_window, progress)
    refusals.log()
    return count


def deletable(tasks: Any) -> Any:
    """Return the tasks that ``delete`` would delete now: the finished tasks that are not needed."""
    return unneeded(tasks).filter(status__in=sorted(FINISHED))


def delete_with_archived(tasks: Any, archived: Any, *, progress: Progress | None = None) -> int:
    """Delete finished tasks and these rows of the archive. Returns how many.

    The rows of the archive are the last ones, so a task that a worker moves meanwhile is deleted in the archive.
    """
    return delete(tasks, progress=progress) + delete_archived(archived, progress)


def deletable_in_archive(using: str) -> Any:
    """Return the rows of the archive, by id: no rows while the cached state says that the archive is not in use."""
    rows = rows_of("ArchivedTask", using)
    return rows.order_by("pk") if may_be_archived(using) else rows.none()


def delete_archived(rows: Any, progress: Progress | None = None) -> int:
    """Delete these rows of the archive. Returns how many."""
    return by_windows(rows, rows, _delete_archived, progress)


def _delete_archived(rows: Any) -> int:
    with transaction_block(rows.db):
        count, _by_model = rows.delete()
    return int(count)
