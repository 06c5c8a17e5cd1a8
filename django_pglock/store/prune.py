"""Pruning: finished tasks are deleted, a window of the table at a time.

Ids are drawn in the order in which tasks are enqueued. So a walk along the primary key finds the old tasks first, and
ends where all tasks are young: ten million rows cost no more than the rows that are deleted. Tasks with ``keep_result``
have a date of their own, and an index on it.

Pruning does not wait for locks, and nobody waits for it: each window is one short transaction that skips locked
rows. Tasks that are still needed stay: a task that others wait for, a task whose unique key is taken for a period, and
a task to which a row of the project refers by a foreign key that refuses its deletion. A task whose deletion is refused
by anything else, such as a trigger, stays as well (``refusals.py``).

The transaction is one message of two statements. The first one locks the rows. The second one has a new snapshot, in
which it checks again whether a task waits for one of them, and deletes the others. A transaction that enqueues a task
with ``after=`` has locked the key of the row until its commit. So either the first statement skips the row, or the
second one sees the waiter.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

from django.core.exceptions import EmptyResultSet
from django.db.models import Exists, OuterRef, Q
from django.db.models.functions import Now

from django_pglock.conf import MOST_DAYS, get_settings
from django_pglock.store.count import MOST_COUNTED, in_status
from django_pglock.store.marking import first_free, locking_sql
from django_pglock.store.move_to_status import WINDOW, Progress
from django_pglock.store.references import refusing_keys, unreferenced
from django_pglock.store.refusals import Refusals
from django_pglock.store.statements import rows_of, run, run_together
from django_pglock.tasks.states import FINISHED, TaskStatus

logger = logging.getLogger("django_pglock.worker")

DAY = 86_400.0
#: Seconds by which the order of ids and the order of dates may differ.
MARGIN = 60.0

# Where the next window of the walk ends, and whether all tasks in it were enqueued less than so many seconds ago. Then
# no task behind it can have ended longer ago, because ids are drawn in the order in which tasks are enqueued.
NEXT_WINDOW = """
SELECT max(id), bool_and(enqueued_at > clock_timestamp() - make_interval(secs => %s))
FROM (SELECT id, enqueued_at FROM {task} WHERE id > %s ORDER BY id LIMIT %s) AS page
"""

# The first task behind an id, and whether it was enqueued in the last so many seconds.
NEXT_AT = """
SELECT id, enqueued_at > clock_timestamp() - make_interval(secs => %s) FROM {task} WHERE id >= %s ORDER BY id LIMIT 1
"""
LAST_ID = "SELECT max(id) FROM {task}"

# The locked tasks, and nothing else, for the next statement of the transaction.
KEEP_IDS = """
SELECT set_config('django_pglock.locked', COALESCE(array_agg(id)::text, '{{}}'), true) FROM old
"""

# Those of the locked tasks for which no task waits. Deletes their attempts, and what they waited for when they were
# cancelled. By an array, so that no estimate can make the planner read a whole table.
UNAWAITED = """WITH old AS MATERIALIZED (
    SELECT locked.id FROM unnest(current_setting('django_pglock.locked')::bigint[]) AS locked (id)
    WHERE NOT EXISTS (SELECT FROM {waiter} WHERE awaited = locked.id)
), attempts AS (
    DELETE FROM {attempt} WHERE task_id = ANY (ARRAY(SELECT id FROM old))
), waits AS (
    DELETE FROM {waiter} WHERE task_id = ANY (ARRAY(SELECT id FROM old))
)"""

PRUNE = f"""
{UNAWAITED}, gone AS (
    DELETE FROM {{task}} WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id
)
SELECT count(*) FROM gone
"""


def prune(
    tasks: Any,
    *,
    older_than: float | None = None,
    statuses: Collection[str] = (),
    batch: int = WINDOW,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> int:
    """Delete those of these tasks that are finished and old enough; ``TaskQuerySet.prune`` describes the arguments."""
    ages = ages_of(older_than, statuses)
    if batch < 1:
        raise ValueError(f"batch is {batch!r}; give 1 or a larger number of rows.")
    old = expired(tasks.filter(status__in=statuses or FINISHED))
    if dry_run:
        return _count(tasks, old, ages)
    count, refusals = 0, Refusals()
    while deleted := refusals.delete(delete_free, old, batch):
        count += deleted
    after = 0
    while last := window_end(tasks.db, after, ages, batch=batch):
        count += refusals.delete(delete_free, outdated(tasks, ages).filter(pk__gt=after, pk__lte=last), batch)
        after = last
        if progress:
            progress(count, after)
    refusals.log()
    return count


def first_id_since(using: str, seconds: float) -> int:
    """Return an id below which lie all tasks that were enqueued more than so many seconds ago, and few others.

    Ids are drawn in the order in which tasks are enqueued, but for a minute in case a clock was set.
    """
    [(last,)] = run(using, LAST_ID)
    first, end = 0, (last or 0) + 1
    while first < end:
        middle = (first + end) // 2
        found = run(using, NEXT_AT, seconds - MARGIN, middle)
        is_old = bool(found) and not found[0][1]
        first, end = (found[0][0] + 1, end) if is_old else (first, middle)
    return first


def _count(tasks: Any, old: Any, ages: Mapping[str, float]) -> int:
    """Count up to ``MOST_COUNTED`` and one tasks that would be deleted, each status in the order of its index."""
    count = int(old[: MOST_COUNTED + 1].count())
    for status, days in ages.items():
        aged = outdated(tasks, {status: days}).filter(pk__lt=first_id_since(tasks.db, days * DAY))
        rows = in_status(aged, status).order_by(*([] if status == TaskStatus.SUCCESSFUL else ["status"]), "pk")
        count += int(rows[: MOST_COUNTED + 1].count())
    return min(count, MOST_COUNTED + 1)


def prune_window(using: str, after: int, ages: Mapping[str, float], *, batch: int = WINDOW) -> tuple[int, int]:
    """Delete expired tasks, and the outdated ones in the one window behind the id ``after``.

    For a caller that prunes a little from time to time. Returns how many tasks were deleted, and the id behind which to
    continue: 0 when the walk has ended.
    """
    tasks, refusals = rows_of("Task", using), Refusals()
    count = refusals.delete(delete_free, expired(tasks), batch)
    last = window_end(using, after, ages, batch=batch)
    if last:
        count += refusals.delete(delete_free, outdated(tasks, ages).filter(pk__gt=after, pk__lte=last), batch)
    refusals.log()
    return count, last


def warn_of_references(using: str, known: set[str]) -> None:
    """Log the tables whose rows keep tasks from being pruned, without the ``known`` ones; add them to these."""
    for table in sorted({key.table for key in refusing_keys(using)} - known):
        logger.warning(
            "Old tasks to which rows of %s refer are not pruned. Give its foreign key ON DELETE in the database.", table
        )
        known.add(table)


def window_end(using: str, after: int, ages: Mapping[str, float], *, batch: int = WINDOW) -> int:
    """Return the last id of the window behind ``after``; 0 when no task from there on can be old enough."""
    if not ages:
        return 0
    [(last, is_young)] = run(using, NEXT_WINDOW, min(ages.values()) * DAY, after, batch)
    return 0 if is_young else last or 0


def outdated(tasks: Any, ages: Mapping[str, float]) -> Any:
    """Finished tasks without ``keep_result`` that nobody needs and that are older than ``ages``: days by status."""
    is_old = Q(pk__in=[])
    for status, days in ages.items():
        is_old |= Q(status=status, finished_at__lte=Now() - timedelta(days=days))
    return unneeded(tasks).filter(is_old, expires_at__isnull=True).order_by("pk")


def expired(tasks: Any) -> Any:
    """Finished tasks that nobody needs and whose ``keep_result`` is over, the longest first."""
    return unneeded(tasks).filter(expires_at__lte=Now(), finished_at__isnull=False).order_by("expires_at")


def locking_old(tasks: Any, limit: int | None, before: str = "") -> tuple[str, tuple[Any, ...]]:
    """Return the statement that locks the first of these tasks that nobody has locked, and keeps their ids.

    ``before``: the first parts of its WITH. Raises ``EmptyResultSet`` if nothing can match.
    """
    # The key is locked as well, unlike by the other verbs: a transaction that enqueues a task to run after one of
    # these has locked its key, and then the task is still needed.
    selection, values = locking_sql(first_free(tasks, limit))
    # A condition of the project's own may have braces.
    selection = selection.replace("{", "{{").replace("}", "}}")
    return f"WITH {before}old (id) AS MATERIALIZED ({selection}){KEEP_IDS}", values


def ages_of(older_than: float | None = None, statuses: Collection[str] = ()) -> dict[str, float]:
    """Return by status after how many days tasks are pruned, for arguments of ``prune``. Raises ``ValueError``."""
    kept = get_settings().PRUNE_AFTER
    policy = {status: days for status, days in kept.items() if days is not None}
    wrong = sorted(set(statuses) - FINISHED)
    if wrong:
        raise ValueError(f"{', '.join(wrong)} tasks cannot be pruned; only {', '.join(sorted(FINISHED))} tasks can.")
    if older_than is not None:
        if not statuses and not policy:
            raise ValueError("PRUNE_AFTER keeps all tasks forever; name the statuses to prune.")
        if not 0 <= older_than <= MOST_DAYS:
            raise ValueError(f"older_than is {older_than!r}; give a number of days from 0 to {MOST_DAYS:,}.")
        return dict.fromkeys(statuses or policy, older_than)
    for_ever = sorted(set(statuses) - set(policy))
    if for_ever:
        raise ValueError(f"PRUNE_AFTER keeps {', '.join(for_ever)} tasks forever; give older_than, in days.")
    return {status: policy[status] for status in statuses or policy}


def unneeded(tasks: Any) -> Any:
    """Return the tasks for which no other task waits, whose unique key is not taken, and to which no row refers."""
    waiters = rows_of("Waiter", tasks.db)
    is_free = Q(unique_until__isnull=True) | Q(unique_key__isnull=True) | Q(unique_until__lte=Now())
    return unreferenced(tasks).filter(is_free, ~Exists(waiters.filter(awaited=OuterRef("pk"))))


def delete_free(tasks: Any, limit: int | None = None) -> int:
    """Delete the first of these tasks that nobody has locked, ``limit`` at most (None: all). Returns how many."""
    try:
        lock = locking_old(tasks, limit)
    except EmptyResultSet:
        # Django knows without asking that nothing can match.
        return 0
    [(count,)] = run_together(tasks.db, lock, (PRUNE, ()))
    return int(count)
