"""Reads the status of the last task of each schedule, also if this task is in the archive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django_pglock.store.archived import archived_among
from django_pglock.store.statements import array_of_numbers, run
from django_pglock.tasks.states import TaskStatus

# By the primary key.
LAST_STATUSES = "SELECT id, status FROM {task} WHERE id = ANY (%s::bigint[])"


def set_last_status(using: str, schedules: Iterable[Any]) -> None:
    """Set ``last_status`` of each of these rows of schedules.

    It is None if there was no tick yet, and if the task has been deleted. Sends one statement, and one more to the
    archive if a task is missing.
    """
    rows = list(schedules)
    wanted = {each.last_task for each in rows} - {None}
    # First the table and then the archive, because a task moves only in this direction.
    found = dict(run(using, LAST_STATUSES, array_of_numbers(wanted))) if wanted else {}
    archived = archived_among(using, wanted - found.keys())
    for each in rows:
        each.last_status = TaskStatus.SUCCESSFUL.value if each.last_task in archived else found.get(each.last_task)
