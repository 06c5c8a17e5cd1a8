"""Deletes finished tasks at the request of a person, whatever their age."""

from __future__ import annotations

from typing import Any

from django_pglock.store.prune import delete_free, unneeded
from django_pglock.store.windows import Progress, by_windows
from django_pglock.tasks.states import FINISHED


def delete(tasks: Any, *, progress: Progress | None = None) -> int:
    """Delete finished tasks with their attempts. Returns how many.

    A task stays if others wait for it, if its unique key is taken for a period, or if a row refers to it.
    """

    def delete_window(tasks: Any) -> int:
        return delete_free(deletable(tasks))

    return by_windows(tasks, tasks.filter(status__in=sorted(FINISHED)).order_by("pk"), delete_window, progress)


def deletable(tasks: Any) -> Any:
    """Return the tasks that ``delete`` would delete now: the finished tasks that are not needed."""
    return unneeded(tasks).filter(status__in=sorted(FINISHED))
