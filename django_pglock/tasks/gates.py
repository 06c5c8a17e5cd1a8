"""Keys at which tasks wait: how they get through, and how whoever waits for a task hears of its end.

A task with a key is BLOCKED until it is *admitted*: made READY, for any worker to claim. So the claims know nothing of
keys, and a hundred thousand tasks that wait for one are in nobody's way.

Two things let a task through, and each commits before it looks: whoever enqueues commits the task and then admits;
whoever finishes one commits the end and then admits. Admitting to a key is done by one at a time, so the later of the
two sees what the other has committed. What a crash leaves undone between the two, upkeep does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

from django.db import connections, transaction

from django_pglock.tasks import statements, wakeup
from django_pglock.tasks.claiming import ClaimQuerySet

#: Keys that are admitted to in one transaction.
KEYS_AT_ONCE = 1000


class GateQuerySet(ClaimQuerySet[Any]):
    """Tasks that wait for a key or for other tasks."""

    def admit(self, keys: Iterable[str | None]) -> int:
        """Make READY what these keys have room for, first come, first served. Returns how many tasks that were."""
        wanted = sorted({key for key in keys if key is not None})
        queues: list[str] = []
        for start in range(0, len(wanted), KEYS_AT_ONCE):
            queues += self._admit(wanted[start : start + KEYS_AT_ONCE])
        self.wake(queues)
        return len(queues)

    def _admit(self, keys: list[str]) -> list[str]:
        with transaction.atomic(using=self.db), connections[self.db].cursor() as cursor:
            cursor.execute(statements.LOCK_KEYS, (keys,))
            cursor.execute(self._sql(statements.ADMIT), (keys,))
            return [queue for (queue,) in cursor.fetchall()]

    def admit_on_commit(self, keys: Collection[str | None]) -> None:
        """Admit once the current transaction is committed."""
        if any(key is not None for key in keys):
            transaction.on_commit(partial(self.admit, keys), using=self.db, robust=True)

    def release(self, awaited: Iterable[int]) -> None:
        """Tell those who wait for these tasks that they are finished, if they are."""

    def release_on_commit(self, awaited: Collection[int]) -> None:
        """Release once the current transaction is committed."""
        transaction.on_commit(partial(self.release, awaited), using=self.db, robust=True)

    def wake(self, queues: Iterable[str], channel: str = wakeup.READY_CHANNEL) -> None:
        """Wake sleeping workers for these queues, once the current transaction is committed."""
        for queue in set(queues):
            notify = partial(wakeup.wake, self.db, channel, queue, self._sql(statements.WAKE))
            transaction.on_commit(notify, using=self.db, robust=True)

    def _sql(self, statement: str) -> str:
        meta, quote = self.model._meta, connections[self.db].ops.quote_name
        return statement.format(
            task=quote(meta.db_table),
            attempt=quote(meta.get_field("failures").related_model._meta.db_table),
            waiter=quote(meta.get_field("awaiting").related_model._meta.db_table),
            worker=quote(meta.apps.get_model("django_pglock", "Worker")._meta.db_table),
        )
