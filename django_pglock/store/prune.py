"""Pruning: finished tasks go, a window of the table at a time.

Ids are drawn in the order in which tasks are enqueued. So a walk along the key meets the old ones first and ends where
all are young, whatever lies behind: ten million rows cost no more than what there is to delete. Tasks with a
``keep_result`` have a date of their own and an index for it.

Nothing waits and nobody is kept waiting: each window is one short statement that skips what somebody has locked. What
is still needed stays: a task that others wait for, and one whose unique key is taken for a period.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.core.exceptions import EmptyResultSet
from django.db import connections
from django.db.models import Exists, OuterRef, Q
from django.db.models.functions import Now

from django_pglock.conf import MOST_DAYS, get_settings
from django_pglock.store import statements
from django_pglock.store.enqueue import EnqueueQuerySet
from django_pglock.tasks.states import FINISHED

if TYPE_CHECKING:
    from typing_extensions import Self

#: Rows that one statement looks at.
WINDOW = 5000
DAY = 86_400.0


class PruneQuerySet(EnqueueQuerySet):
    """Tasks, and how they go."""

    def prune(
        self,
        *,
        older_than: float | None = None,
        statuses: Collection[str] = (),
        batch: int = WINDOW,
        dry_run: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Delete finished tasks of this queryset that are old enough, with their attempts. Returns how many.

        - ``older_than``: days since they finished; None: what ``PRUNE_AFTER`` says for each status.
        - ``statuses``: only these; none: those that ``PRUNE_AFTER`` does not keep for ever.
        - ``batch``: rows that one statement looks at.
        - ``dry_run``: delete nothing, only count.
        - ``progress``: is called after each batch with the number so far and the id up to which the walk has come.

        A task with ``keep_result`` goes when that is over, whatever its age. Call it outside of a transaction, or all
        batches are one. Raises ``ValueError``.
        """
        ages = ages_of(older_than, statuses)
        if batch < 1:
            raise ValueError(f"A batch is a number of rows, one or more; {batch!r} was given.")
        expired = self.filter(status__in=statuses or FINISHED).expired()
        count = expired.count() if dry_run else 0
        while not dry_run and (deleted := _delete(expired, batch)):
            count += deleted
        after = 0
        while last := self.window_end(after, ages, batch=batch):
            window = self.outdated(ages).filter(pk__gt=after, pk__lte=last)
            count += window.count() if dry_run else _delete(window, batch)
            after = last
            if progress:
                progress(count, after)
        return count

    def prune_window(self, after: int, ages: Mapping[str, float], *, batch: int = WINDOW) -> tuple[int, int]:
        """Delete what is expired, and what is outdated in the one window behind the id ``after``.

        For who prunes a little now and then. Returns how many tasks went, and where to go on: at 0 when the walk has
        come to its end.
        """
        count = _delete(self.expired(), batch)
        last = self.window_end(after, ages, batch=batch)
        if last:
            count += _delete(self.outdated(ages).filter(pk__gt=after, pk__lte=last), batch)
        return count, last

    def window_end(self, after: int, ages: Mapping[str, float], *, batch: int = WINDOW) -> int:
        """Return the last id of the window behind ``after``; 0 when nothing from there on can be old enough."""
        if not ages:
            return 0
        [(last, is_young)] = self._run(statements.NEXT_WINDOW, min(ages.values()) * DAY, after, batch)
        return 0 if is_young else last or 0

    def outdated(self, ages: Mapping[str, float]) -> Self:
        """Finished tasks without ``keep_result`` that nobody needs and that are older than ``ages``: days by status."""
        is_old = Q(pk__in=[])
        for status, days in ages.items():
            is_old |= Q(status=status, finished_at__lte=Now() - timedelta(days=days))
        return self._unneeded().filter(is_old, expires_at__isnull=True).order_by("pk")

    def expired(self) -> Self:
        """Finished tasks that nobody needs and whose ``keep_result`` is over, the longest first."""
        return self._unneeded().filter(expires_at__lte=Now(), finished_at__isnull=False).order_by("expires_at")

    def _unneeded(self) -> Self:
        waiters = self.model._meta.apps.get_model("django_pglock", "Waiter").objects.using(self.db)
        is_free = Q(unique_until__isnull=True) | Q(unique_key__isnull=True) | Q(unique_until__lte=Now())
        return self.filter(is_free, ~Exists(waiters.filter(awaited=OuterRef("pk"))))

    def pruning_sql(self, limit: int) -> tuple[str, tuple[Any, ...]]:
        """Return the statement that deletes the first tasks of this queryset which nobody has locked."""
        # The key as well, which the other verbs leave to those who enqueue something to run after a task.
        selection, values = self._selection_sql(super()._selection(limit))
        return f"WITH old (id) AS MATERIALIZED ({selection}){self._sql(statements.PRUNE)}", values


def ages_of(older_than: float | None = None, statuses: Collection[str] = ()) -> dict[str, float]:
    """Return after how many days tasks of which status go, as ``prune`` is asked. Raises ``ValueError``."""
    kept = get_settings().PRUNE_AFTER
    policy = {status: days for status, days in kept.items() if days is not None}
    wrong = sorted(set(statuses) - FINISHED)
    if wrong:
        raise ValueError(f"Only finished tasks are pruned: {', '.join(sorted(FINISHED))}; not {', '.join(wrong)}.")
    if older_than is not None:
        if not statuses and not policy:
            raise ValueError("PRUNE_AFTER keeps all tasks for ever; name the statuses that may go.")
        if not 0 <= older_than <= MOST_DAYS:
            raise ValueError(f"older_than is {older_than!r}; give a number of days from 0 to {MOST_DAYS:,}.")
        return dict.fromkeys(statuses or policy, older_than)
    for_ever = sorted(set(statuses) - set(policy))
    if for_ever:
        raise ValueError(f"PRUNE_AFTER keeps {', '.join(for_ever)} tasks for ever; say older than how many days.")
    return {status: policy[status] for status in statuses or policy}


def _delete(rows: PruneQuerySet, limit: int) -> int:
    try:
        sql, values = rows.pruning_sql(limit)
    except EmptyResultSet:
        # Django knows without asking that nothing can match.
        return 0
    with connections[rows.db].cursor() as cursor:
        cursor.execute(sql, values)
        return int(cursor.fetchone()[0])
