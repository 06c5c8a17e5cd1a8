"""The failed and lost attempts of a task that runs again."""

from __future__ import annotations

from typing import Any

from django_pglock.store.statements import rows_of


def attempts_before(using: str, task_id: int) -> list[Any]:
    """Return the rows of the failed and lost attempts of a task, in order."""
    return list(rows_of("Attempt", using).filter(task=task_id).order_by("number"))
