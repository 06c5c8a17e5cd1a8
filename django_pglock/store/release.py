"""Waiting for tasks to finish: other tasks (``after=``), and processes (``result.wait()``).

Both leave a row in the table of waiters, commit it, and then look whether the task is finished. Whoever finishes a task
commits that, and then looks for waiters. So one of the two always sees the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from django.db import OperationalError, transaction
from psycopg.errors import LockNotAvailable

from django_pglock.store import statements
from django_pglock.store import wake as wakeup
from django_pglock.store.admit import GateQuerySet, array_of_numbers
from django_pglock.tasks.states import TaskStatus

#: Processes that wait for a result listen here; the payload is the task's id.
DONE_CHANNEL = "django_pglock_done"
DEPENDENCY_FAILED = "django_pglock.errors.DependencyFailed"
#: Waiters that upkeep looks at in one round.
WAITERS_AT_ONCE = 5000
#: Waiters that one statement tells, and retried tasks that one lets wait again.
TOLD_AT_ONCE = 200


class WaitQuerySet(GateQuerySet):
    """Tasks that others wait for."""

    def release(self, awaited: Iterable[int]) -> int:
        """Tell those who wait for these tasks, where they are finished. Returns how many tasks that moved.

        A waiting task whose last predecessor is done is let through; one of which a predecessor did not succeed is
        cancelled, and so are those that wait for it. One that somebody has locked is left for upkeep.
        """
        moved, ids = 0, set(awaited)
        while ids and (ids := self._awaited(ids)):
            cancelled, told = [], TOLD_AT_ONCE
            while told == TOLD_AT_ONCE:
                rows, told = self._release(sorted(ids))
                moved += len(rows)
                cancelled += [id_ for id_, status, *_ in rows if status == TaskStatus.CANCELLED]
            ids = set(cancelled)
        return moved

    def _awaited(self, ids: set[int]) -> set[int]:
        most = 2 * len(ids)
        found = self._run(statements.AWAITED_BETWEEN, min(ids), max(ids), most)
        if len(found) == most:
            found = self._run(statements.AWAITED, array_of_numbers(ids))
        return ids & {id_ for (id_,) in found}

    def _release(self, ids: list[int]) -> tuple[list[tuple[int, str, str, str | None, int]], int]:
        """Tell some of those who wait; return the tasks that this moved, and how many were told."""
        text = "Task %s, which this one was to run after, did not succeed or is gone."
        values = (array_of_numbers(ids), TOLD_AT_ONCE, DEPENDENCY_FAILED, text, DONE_CHANNEL)
        try:
            rows = self._run(statements.RELEASE, *values)
        except OperationalError as error:
            if not isinstance(error.__cause__, LockNotAvailable):
                raise
            # Somebody's open transaction has one of those that wait. It does not hold up the others.
            rows = self._run(statements.RELEASE_UNLOCKED, *values)
        [told] = {row[-1] for row in rows}
        moved = [row[:-1] for row in rows if row[0] is not None]
        self.wake(queue for _, status, queue, *_ in moved if status == TaskStatus.READY)
        self.wake((queue for _, status, queue, *_ in moved if status == TaskStatus.SCHEDULED), wakeup.SCHEDULED_CHANNEL)
        # One that is cancelled is in nobody's way any more, whatever else it waited for.
        self.admit(key for _, status, _, key, waits_for in moved if waits_for == 0 or status == TaskStatus.CANCELLED)
        return moved, told

    def wait_again(self, ids: Sequence[int]) -> None:
        """Block those of these retried tasks whose ``after=`` has not succeeded, until it has.

        Has to be in the transaction that has retried them. Those whose ``after=`` has failed, and is not retried with
        them, are cancelled again after the commit.
        """
        waiting = [id_ for (id_,) in self._run(statements.HAVE_AWAITED, array_of_numbers(ids))] if ids else []
        for start in range(0, len(waiting), TOLD_AT_ONCE):
            some = array_of_numbers(waiting[start : start + TOLD_AT_ONCE])
            self.release_on_commit([awaited for (awaited,) in self._run(statements.WAIT_AGAIN, some)])

    def note_waits(self, awaited: Sequence[int], *, instead_of: Sequence[int]) -> dict[int, int]:
        """Leave a row for each of these tasks, so that its end is told on ``DONE_CHANNEL``; delete rows from before.

        Returns the new rows' ids by the tasks' ids. Whoever calls has to look whether a task has ended already.
        """
        values = (array_of_numbers(instead_of), array_of_numbers(awaited))
        return dict(self._run(statements.NOTE_WAITS, *values))

    def ended(self, ids: Sequence[int]) -> list[tuple[int, bool]]:
        """Return which of these tasks have ended, or are not there (False)."""
        is_finished = dict(self._run(statements.LOOK_AT_AWAITED, array_of_numbers(ids)))
        return [(id_, id_ in is_finished) for id_ in ids if is_finished.get(id_, True)]

    def release_on_commit(self, awaited: Collection[int]) -> None:
        """Release once the current transaction is committed."""
        if awaited:
            transaction.on_commit(partial(self.release, awaited), using=self.db, robust=True)

    def stray_waiters(self, after: int, *, limit: int = WAITERS_AT_ONCE) -> list[tuple[int, int | None]]:
        """Return the next waiters behind the id ``after``: their ids, and what each has waited for in vain."""
        return self._run(statements.STRAY_WAITERS, after, limit)

    def lock_awaited(self, ids: Collection[int]) -> list[int]:
        """Keep these tasks to the end of the transaction; return those of the ids that no task has."""
        known = {id_ for (id_,) in self._run(statements.LOCK_AWAITED, array_of_numbers(ids))}
        return [each for each in ids if each not in known]
