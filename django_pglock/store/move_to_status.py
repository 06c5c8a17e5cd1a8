"""Moves the tasks of a queryset to another status or queue. For the operations that people request.

The statement names the statuses from which it moves, so it does not change a task that has another status by now. No
code reads a status first and writes it afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.db.models import Case, Value, When
from django.db.models.functions import Now

from django_pglock.store.admit import admit_on_commit
from django_pglock.store.marking import first_free, mark
from django_pglock.store.release import release_on_commit
from django_pglock.store.wake import wake
from django_pglock.store.windows import Progress, by_windows
from django_pglock.tasks.compat import task_backends
from django_pglock.tasks.queues import check_queue_name
from django_pglock.tasks.states import FINISHED, WAITING, TaskStatus, sources_of

#: The new status of a due task: READY, or BLOCKED if it must be admitted to its lock key first.
DUE_STATUS = Case(
    When(lock_key__isnull=True, then=Value(TaskStatus.READY.value)), default=Value(TaskStatus.BLOCKED.value)
)


def movable(target: TaskStatus, among: Iterable[str]) -> list[str]:
    """Return those of the statuses ``among`` from which a task may move to ``target``."""
    return sorted(set(sources_of(target)) & set(among))


def move(
    tasks: Any,
    target: TaskStatus,
    changes: dict[str, Any],
    *,
    among: Iterable[str] = TaskStatus.values,
    skip_locked: bool = True,
) -> list[tuple[Any, ...]]:
    """Apply ``changes`` to those of ``tasks`` that may move to ``target`` and have one of the statuses ``among``.

    Locked rows are skipped, unless the caller limits how long a statement waits for them. Returns the id, queue, new
    status and lock key of each. After the commit, workers are woken, the next tasks of
    these lock keys are admitted, and the waiters of these tasks are released.
    """
    chosen = tasks.filter(status__in=movable(target, among)).order_by("id")
    free = first_free(chosen, no_key=True, skip_locked=skip_locked)
    moved = mark(free, changes, "id", "queue", "status", "lock_key")
    wake(tasks.db, (queue for _, queue, status, _ in moved if status == TaskStatus.READY))
    admit_on_commit(tasks.db, {key for _, _, status, key in moved if status != TaskStatus.RUNNING})
    release_on_commit(tasks.db, [id_ for id_, _, status, _ in moved if status in FINISHED])
    return moved


_FAILED = (TaskStatus.FAILED.value,)


def discard(tasks: Any, *, progress: Progress | None = None) -> int:
    """Make failed tasks CANCELLED. Returns how many. Their attempts stay, and so does the date of their end."""
    return by_windows(tasks, tasks.filter(status__in=_FAILED).order_by("pk"), _discard, progress)


def _discard(tasks: Any) -> int:
    changes = {"status": TaskStatus.CANCELLED.value, "fingerprint": None}
    return len(move(tasks, TaskStatus.CANCELLED, changes, among=_FAILED))


def run_now(tasks: Any, *, progress: Progress | None = None) -> int:
    """Make scheduled tasks READY, or BLOCKED if they have a lock key. Returns how many."""
    return by_windows(tasks, tasks.filter(status=TaskStatus.SCHEDULED).order_by("pk"), _run_now, progress)


def _run_now(tasks: Any) -> int:
    # Now, so that the age of the oldest ready task does not include the time before.
    return len(move(tasks, TaskStatus.READY, {"status": DUE_STATUS, "run_after": Now()}, among={TaskStatus.SCHEDULED}))


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
