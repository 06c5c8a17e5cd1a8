"""Makes scheduled tasks READY before they are due, at the request of a person."""

from __future__ import annotations

from typing import Any

from django.db.models.functions import Now

from django_pglock.store.move_to_status import DUE_STATUS, move
from django_pglock.store.windows import Progress, by_windows
from django_pglock.tasks.states import TaskStatus


def run_now(tasks: Any, *, progress: Progress | None = None) -> int:
    """Make scheduled tasks READY, or BLOCKED if they have a lock key. Returns how many."""
    return by_windows(tasks, tasks.filter(status=TaskStatus.SCHEDULED).order_by("pk"), _run_now, progress)


def _run_now(tasks: Any) -> int:
    # Now, so that the age of the oldest ready task does not include the time before.
    return len(move(tasks, TaskStatus.READY, {"status": DUE_STATUS, "run_after": Now()}, among={TaskStatus.SCHEDULED}))
