"""Pruning: finished tasks are deleted, a window of the table at a time.

Ids are drawn in the order in which tasks are enqueued. So a walk along the primary key finds the old tasks first, and
ends where all tasks are young: ten million rows cost no more than the rows that are deleted. Tasks with ``keep_result``
have a date of their own, and an index on it.

Pruning does not wait for locks, and nobody waits for it: each window is one short statement that skips locked
rows. Tasks that are still needed stay: a task that others wait for, and a task whose unique key is taken for a period.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

from django.core.exceptions import EmptyResultSet
from django.db import connections
from django.db.models import Exists, OuterRef, Q
from django.db.models.functions import Now

from django_pglock.conf import MOST_DAYS, get_settings
from django_pglock.store.count import MOST_COUNTED, in_status
from django_pglock.store.marking import first_free, locking_sql
from django_pglock.store.move import WINDOW, Progress
from django_pglock.store.sql import filled, rows_of, run
from django_pglock.tasks.states import FINISHED, TaskStatus

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

# Deletes the tasks that the selection before it has locked, with their attempts, and what they waited for when they
# were cancelled. By an array, so that no estimate can make the planner read a whole table.
PRUNE = """, attempts AS (
    DELETE FROM {attempt} WHERE task_id = ANY (ARRAY(SELECT id FROM old))
), waits AS (
    DELETE FROM {waiter} WHERE task_id = ANY (ARRAY(SELECT id FROM old))
), gone AS (
    DELETE FROM {task} WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id
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
    """Delete those of these tasks that are finished and old enough; ``TaskManager.prune`` describes the arguments."""
    ages = ages_of(older_than, statuses)
    if batch < 1:
        raise ValueError(f"batch is {batch!r}; give 1 or a larger number of rows.")
    old = expired(tasks.filter(status__in=statuses or FINISHED))
    if dry_run:
        return _count(tasks, old, ages)
    count = 0
    while deleted := delete_free(old, batch):
        count += deleted
    after = 0
    while last := window_end(tasks.db, after, ages, batch=batch):
        count += delete_free(outdated(tasks, ages).filter(pk__gt=after, pk__lte=last), batch)
        after = last
        if progress:
            progress(count, after)
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
    tasks = rows_of("Task", using)
    count = delete_free(expired(tasks), batch)
    last = window_end(using, after, ages, batch=batch)
    if last:
        count += delete_free(outdated(tasks, ages).filter(pk__gt=after, pk__lte=last), batch)
    return count, last


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


def pruning_sql(tasks: Any, limit: int | None) -> tuple[str, tuple[Any, ...]]:
    """Return the statement that deletes the first of these tasks that nobody has locked."""
    # The key is locked as well, unlike by the other verbs: a transaction that enqueues a task to run after one of
    # these has locked its key, and then the task is still needed.
    selection, values = locking_sql(first_free(tasks, limit))
    return f"WITH old (id) AS MATERIALIZED ({selection}){filled(PRUNE)}", values


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
    """Return the tasks for which no other task waits, and whose unique key is not taken for a period."""
    waiters = rows_of("Waiter", tasks.db)
    is_free = Q(unique_until__isnull=True) | Q(unique_key__isnull=True) | Q(unique_until__lte=Now())
    return tasks.filter(is_free, ~Exists(waiters.filter(awaited=OuterRef("pk"))))


def delete_free(tasks: Any, limit: int | None = None) -> int:
    """Delete the first of these tasks that nobody has locked, ``limit`` at most (None: all). Returns how many."""
    try:
        sql, values = pruning_sql(tasks, limit)
    except EmptyResultSet:
        # Django knows without asking that nothing can match.
        return 0
    with connections[tasks.db].cursor() as cursor:
        cursor.execute(sql, values)
        return int(cursor.fetchone()[0])
