"""What the verbs of people share: moving the tasks of a queryset to another status, some thousands at a time.

The statement names the statuses from which it moves, so it changes no task that is in another one. Nothing reads a
status first and writes afterwards.
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

#: The status of a task that is due: READY, or BLOCKED until it is admitted to its lock key.
DUE_STATUS = Case(
    When(lock_key__isnull=True, then=Value(TaskStatus.READY.value)), default=Value(TaskStatus.BLOCKED.value)
)
#: Rows that one statement moves, or reads.
WINDOW = 5000
#: How often a verb tries again with tasks whose rows are locked, and the seconds between two tries.
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
    """Apply ``verb`` to the ``chosen`` of these tasks, some thousands at a time, so that nobody waits for them all.

    ``progress`` is called after each window, with the number so far and the last id. Inside the caller's transaction
    ``verb`` gets all ``tasks`` at once: their rows stay locked until its end in any case.
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
    """Say whether a task has one of these ids: one array instead of a parameter for each, which takes far longer."""
    template = "%(expressions)s::bigint[])"
    array = Value(array_of_numbers(ids))
    return Func(F("pk"), array, template=template, arg_joiner=" = ANY (", output_field=BooleanField())
