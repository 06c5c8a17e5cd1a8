"""Makes failed tasks CANCELLED at the request of a person, so that they no longer count as failures."""

from __future__ import annotations

from typing import Any

from django_pglock.store.move_to_status import move
from django_pglock.store.windows import Progress, by_windows
from django_pglock.tasks.states import TaskStatus

_FAILED = (TaskStatus.FAILED.value,)


def discard(tasks: Any, *, progress: Progress | None = None) -> int:
    """Make failed tasks CANCELLED. Returns how many. Their attempts stay, and so does the date of their end."""
    return by_windows(tasks, tasks.filter(status__in=_FAILED).order_by("pk"), _discard, progress)


def _discard(tasks: Any) -> int:
    changes = {"status": TaskStatus.CANCELLED.value, "fingerprint": None}
    return len(move(tasks, TaskStatus.CANCELLED, changes, among=_FAILED))
