"""Moves waiting tasks to another queue at the request of a person."""

from __future__ import annotations

from typing import Any

from django_pglock.store.marking import first_free, mark
from django_pglock.store.wake import wake
from django_pglock.store.windows import Progress, by_windows
from django_pglock.tasks.compat import task_backends
from django_pglock.tasks.queues import check_queue_name
from django_pglock.tasks.states import WAITING, TaskStatus


def move_to_queue(tasks: Any, queue: str, *, progress: Progress | None = None) -> int:
    """Move waiting tasks to the queue. Returns how many. Raises ``ValueError`` for a name that QUEUES does not list."""
    check_target(tasks.db, queue)

    def verb(window: Any) -> int:
        return _move(window, queue)

    return by_windows(tasks, movable_to(tasks, queue).order_by("pk"), verb, progress)


def movable_to(tasks: Any, queue: str) -> Any:
    """Return the tasks that ``move_to_queue`` would move now: the waiting tasks of other queues."""
    return tasks.filter(status__in=sorted(WAITING)).exclude(queue=queue)


def check_target(using: str, queue: str) -> None:
    """Raise ``ValueError`` for an invalid name, and for a name that no backend of this database lists in QUEUES."""
    check_queue_name(queue)
    here = [backend.queues for backend in task_backends.all() if getattr(backend, "database", None) == using]
    # A backend with an empty QUEUES accepts every name.
    if here and not any(queue in queues or not queues for queues in here):
        raise ValueError(f"No backend in TASKS lists the queue {queue!r} in QUEUES, so no task may be in it.")


def _move(tasks: Any, queue: str) -> int:
    moved = mark(first_free(movable_to(tasks, queue).order_by("id"), no_key=True), {"queue": queue}, "status")
    if any(status == TaskStatus.READY for (status,) in moved):
        wake(tasks.db, [queue])
    return len(moved)
