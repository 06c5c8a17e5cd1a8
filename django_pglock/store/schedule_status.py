"""Reads the status of the last task of each schedule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django_pglock.store.statements import array_of_numbers, run

# By the primary key.
LAST_STATUSES = "SELECT id, status FROM {task} WHERE id = ANY (%s::bigint[])"


def set_last_status(using: str, schedules: Iterable[Any]) -> None:
    """Set ``last_status`` of each of these rows of schedules.

    It is None if there was no tick yet, and if the task has been deleted. Sends one statement.
    """
    rows = list(schedules)
    wanted = {each.last_task for each in rows} - {None}
    found = dict(run(using, LAST_STATUSES, array_of_numbers(wanted))) if wanted else {}
    for each in rows:
        each.last_status = found.get(each.last_task)
