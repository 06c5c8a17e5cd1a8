"""Moves the tasks of a queryset to another status, some thousand at a time. For the operations that people request.

The statement names the statuses from which it moves, so it does not change a task that has another status by now. No
code reads a status first and writes it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from django.db.models import BooleanField, Case, F, Func, Value, When

from django_pglock.postgres.connections import connection_for, in_transaction
from django_pglock.store.admit import admit_on_commit
from django_pglock.store.marking import first_free, mark
from django_pglock.store.release import release_on_commit
from django_pglock.store.statements import array_of_numbers
from django_pglock.store.wake import wake
from django_pglock.tasks.states import FINISHED, TaskStatus, sources_of

#: The new status of a due task: READY, or BLOCKED if it must be admitted to its lock key first.
DUE_STATUS = Case(
    When(lock_key__isnull=True, then=Value(TaskStatus.READY.value)), default=Value(TaskStatus.BLOCKED.value)
)
#: The number of rows that one statement moves or reads.
WINDOW = 5000
#: How often a call tries again to move tasks whose rows are locked, and the seconds between two tries.
TRIES, BETWEEN_TRIES = 3, 0.01

Progress = Callable[[int, int], None]


def movable(target: TaskStatus, among: Iterable[str]) -> list[str]:
    """Return those of the statuses ``among`` from which a task may move to ``target``."""
    return sorted(set(sources_of(target)) & set(among))


def move(
    tasks: Any, target: TaskStatus, changes: dict[str, Any], *, among: Iterable[str] = TaskStatus.values
) -> list[tuple[Any, ...]]:
    """Apply ``changes`` to those of ``tasks`` that may move to ``target`` and have one of the statuses ``among``.

    Returns the id, queue, new status and lock key of each. After the commit, workers are woken, the next tasks of
    these lock keys are admitted, and the waiters of these tasks are released.
    """
    free = first_free(tasks.filter(status__in=movable(target, among)).order_by("id"), no_key=True)
    moved = mark(free, changes, "id", "queue", "status", "lock_key")
    wake(tasks.db, (queue for _, queue, status, _ in moved if status == TaskStatus.READY))
    admit_on_commit(tasks.db, {key for _, _, status, key in moved if status != TaskStatus.RUNNING})
    release_on_commit(tasks.db, [id_ for id_, _, status, _ in moved if status in FINISHED])
    return moved


def by_windows(tasks: Any, chosen: Any, verb: Callable[[Any], int], progress: Progress | None) -> int:
    """Apply ``verb`` to the ``chosen`` of these tasks in windows of some thousand, so that row locks are short.

    ``progress`` is called after each window, with the number of tasks so far and the last id. Inside the caller's
    transaction ``verb`` gets all ``tasks`` at once, because their rows stay locked until its end in any case.
    """
    if in_transaction(connection_for(tasks.db)):
        return verb(tasks)
    count, ids = 0, list(chosen.values_list("pk", flat=True))
    for start in range(0, len(ids), WINDOW):
        window = ids[start : start + WINDOW]
        count += verb(tasks.filter(is_among(window)))
        if progress:
            progress(count, window[-1])
    return count


def is_among(ids: Iterable[int]) -> Func:
    """Return a condition: a task has one of these ids. As one array, because a parameter for each takes far longer."""
    template = "%(expressions)s::bigint[])"
    array = Value(array_of_numbers(ids))
    return Func(F("pk"), array, template=template, arg_joiner=" = ANY (", output_field=BooleanField())
