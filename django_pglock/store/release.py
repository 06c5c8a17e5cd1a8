"""When a task ends, those who wait for it are told: other tasks (``after=``), and processes (``result.wait()``).

Both leave a row in the table of waiters, commit it, and then look whether the task is finished. Whoever finishes a task
commits that, and then looks for waiters. So one of the two always sees the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

from django.db import OperationalError, transaction
from psycopg.errors import LockNotAvailable

from django_pglock.store import statements
from django_pglock.store.admit import admit
from django_pglock.store.sql import array_of_numbers, run
from django_pglock.store.wake import SCHEDULED_CHANNEL, wake
from django_pglock.tasks.states import TaskStatus

#: Processes that wait for a result listen here; the payload is the task's id.
DONE_CHANNEL = "django_pglock_done"
DEPENDENCY_FAILED = "django_pglock.errors.DependencyFailed"
#: Waiters that upkeep looks at in one round.
WAITERS_AT_ONCE = 5000
#: Waiters that one statement tells.
TOLD_AT_ONCE = 200


def release(using: str, awaited: Iterable[int]) -> int:
    """Tell those who wait for these tasks, where they are finished. Returns how many tasks that moved.

    A waiting task whose last predecessor is done is let through; one of which a predecessor did not succeed is
    cancelled, and so are those that wait for it. One that somebody has locked is left for upkeep.
    """
    moved, ids = 0, set(awaited)
    while ids and (ids := _awaited(using, ids)):
        cancelled, told = [], TOLD_AT_ONCE
        while told == TOLD_AT_ONCE:
            rows, told = _release(using, sorted(ids))
            moved += len(rows)
            cancelled += [id_ for id_, status, *_ in rows if status == TaskStatus.CANCELLED]
        ids = set(cancelled)
    return moved


def release_on_commit(using: str, awaited: Collection[int]) -> None:
    """Release once the current transaction is committed."""
    if awaited:
        transaction.on_commit(partial(release, using, awaited), using=using, robust=True)


def stray_waiters(using: str, after: int, *, limit: int = WAITERS_AT_ONCE) -> list[tuple[int, int | None]]:
    """Return the next waiters behind the id ``after``: their ids, and what each has waited for in vain."""
    return run(using, statements.STRAY_WAITERS, after, limit)


def _awaited(using: str, ids: set[int]) -> set[int]:
    most = 2 * len(ids)
    found = run(using, statements.AWAITED_BETWEEN, min(ids), max(ids), most)
    if len(found) == most:
        found = run(using, statements.AWAITED, array_of_numbers(ids))
    return ids & {id_ for (id_,) in found}


def _release(using: str, ids: list[int]) -> tuple[list[tuple[int, str, str, str | None, int]], int]:
    """Tell some of those who wait; return the tasks that this moved, and how many were told."""
    text = "Task %s, which this one was to run after, did not succeed or is gone."
    values = (array_of_numbers(ids), TOLD_AT_ONCE, DEPENDENCY_FAILED, text, DONE_CHANNEL)
    try:
        rows = run(using, statements.RELEASE, *values)
    except OperationalError as error:
        if not isinstance(error.__cause__, LockNotAvailable):
            raise
        # Somebody's open transaction has one of those that wait. It does not hold up the others.
        rows = run(using, statements.RELEASE_UNLOCKED, *values)
    [told] = {row[-1] for row in rows}
    moved = [row[:-1] for row in rows if row[0] is not None]
    wake(using, (queue for _, status, queue, *_ in moved if status == TaskStatus.READY))
    wake(using, (queue for _, status, queue, *_ in moved if status == TaskStatus.SCHEDULED), SCHEDULED_CHANNEL)
    # One that is cancelled is in nobody's way any more, whatever else it waited for.
    admit(using, (key for _, status, _, key, waits_for in moved if waits_for == 0 or status == TaskStatus.CANCELLED))
    return moved, told
