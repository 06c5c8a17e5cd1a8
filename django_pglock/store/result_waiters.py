"""The waiter rows of processes that wait until a task has ended (``result.wait()``)."""

from __future__ import annotations

from collections.abc import Sequence

from django_pglock.store.statements import array_of_numbers, run

#: Processes that wait for a result listen here; the payload is the task's id.
DONE_CHANNEL = "django_pglock_done"

# Inserts a waiter row for each task that this process waits for, and deletes rows of tasks that it no longer waits for.
# Rows that ``RELEASE`` deletes at this moment are skipped, because two transactions that delete several rows in
# different orders could deadlock.
WRITE_WAITERS = """
WITH gone AS (
    DELETE FROM {waiter} WHERE id = ANY (ARRAY(
        SELECT id FROM {waiter} WHERE id = ANY (%s::bigint[]) FOR UPDATE SKIP LOCKED))
)
INSERT INTO {waiter} (awaited) SELECT unnest(%s::bigint[]) RETURNING awaited, id
"""

# The tasks of a list of ids, and whether each has ended.
FIND_ENDED = "SELECT id, finished_at IS NOT NULL FROM {task} WHERE id = ANY (%s::bigint[])"


def write_waiters(using: str, awaited: Sequence[int], *, instead_of: Sequence[int]) -> dict[int, int]:
    """Write a waiter row for each of these tasks, and delete earlier rows.

    The end of a task is notified on ``DONE_CHANNEL``. ``instead_of``: the ids of the earlier rows. Returns the ids of
    the new rows by the ids of the tasks. Afterwards the caller must check whether a task has already ended.
    """
    values = (array_of_numbers(instead_of), array_of_numbers(awaited))
    return dict(run(using, WRITE_WAITERS, *values))


def ended(using: str, ids: Sequence[int]) -> list[tuple[int, bool]]:
    """Return those of these tasks that have ended, with True, and those that do not exist, with False."""
    is_finished = dict(run(using, FIND_ENDED, array_of_numbers(ids)))
    return [(id_, id_ in is_finished) for id_ in ids if is_finished.get(id_, True)]
