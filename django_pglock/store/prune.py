"""Pruning: deletes old finished tasks, one window of the table at a time.

Tasks get their ids in the order in which they are enqueued. So pruning reads along the primary key, finds the old tasks
first, and stops where all tasks are young. The cost depends on the number of deleted rows, not on the size of the
table. Tasks with ``keep_result`` have their own expiry date, and an index on it.

Pruning does not wait for locks, and no other transaction waits for it: each window is one short transaction that skips
locked rows. Tasks that are still needed stay: a task that other tasks wait for, a task whose unique key is taken for a
period, and a task to which a row of the project refers by a foreign key that refuses its deletion. If the
role may not read that table, the whole window stays, and the log says so.

The transaction is one message of two statements. The first one locks the rows. The second one has a newer snapshot. It
checks again whether a task waits for one of the locked tasks, and deletes the others. A transaction that enqueues a
task with ``after=`` has locked the key of the awaited row until its commit. So either the first statement skips the
row, or the second one sees the waiter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

from django.core.exceptions import EmptyResultSet
from django.db import IntegrityError
from django.db.models import BooleanField, DateTimeField, F, Func, OuterRef, Q, Subquery
from django.db.models.functions import Now
from django.db.models.lookups import IsNull

from django_pglock.conf import MOST_DAYS, get_settings
from django_pglock.error_reading import one_line
from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.connections import connection_for, in_transaction
from django_pglock.store.id_range import DAY, first_id_since
from django_pglock.store.marking import first_free, locking_sql
from django_pglock.store.statements import MOST_COUNTED, WINDOW, in_status, rows_of, run
from django_pglock.tasks.states import FINISHED, TaskStatus

logger = get_logger(WORKER)

# The last id of the next window, and whether all tasks in it were enqueued less than a number of seconds ago. If so, no
# task behind the window can be older, because tasks get their ids in the order in which they are enqueued.
NEXT_WINDOW = """
SELECT max(id), bool_and(enqueued_at > clock_timestamp() - make_interval(secs => %s))
FROM (SELECT id, enqueued_at FROM {task} WHERE id > %s ORDER BY id LIMIT %s) AS page
"""

# Keeps the ids of the locked tasks in a setting, for the next statement of the transaction.
KEEP_IDS = """
SELECT set_config('django_pglock.locked', COALESCE(array_agg(id)::text, '{{}}'), true) FROM old
"""

# The locked tasks for which no other task waits. Deletes their attempts and their own waiter rows. A task that was
# cancelled while it waited still has waiter rows. Rows are selected by an array, and by a subquery instead of NOT
# EXISTS, which is a join, so that no wrong estimate can make the planner read a whole table.
UNAWAITED = """WITH old AS MATERIALIZED (
    SELECT locked.id FROM unnest(current_setting('django_pglock.locked')::bigint[]) AS locked (id)
    WHERE (SELECT awaited FROM {waiter} WHERE awaited = locked.id LIMIT 1) IS NULL
), attempts AS (
    DELETE FROM {attempt} WHERE task_id = ANY (ARRAY(SELECT id FROM old))
), waits AS (
    DELETE FROM {waiter} WHERE task_id = ANY (ARRAY(SELECT id FROM old))
), steps AS (
    DELETE FROM {step} WHERE task_id = ANY (ARRAY(SELECT id FROM old))
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
) -> int:
    """Delete finished tasks of this queryset that are old enough, with their attempts. Returns how many.

    - ``older_than``: days since they finished; None: the value of ``PRUNE_AFTER`` for each status.
    - ``statuses``: only these statuses; none: those that ``PRUNE_AFTER`` does not keep forever.
    - ``batch``: the number of rows that one statement reads.
    - ``dry_run``: delete nothing, only count, up to 10,001.

    A task with ``keep_result`` is deleted when that time is over, whatever its age. Call it outside of a transaction.
    Inside of one, all batches are one batch. Raises ``ValueError``.
    """
    ages = ages_of(older_than, statuses)
    old = expired(tasks.filter(status__in=statuses or FINISHED))
    if dry_run:
        return _count(tasks, old, ages)
    count = last = 0
    while deleted := _delete_unless_refused(old, batch):
        count += deleted
    while True:
        deleted, last = _prune_outdated(tasks, last, ages, batch)
        if not last:
            return count
        count += deleted


def _count(tasks: Any, old: Any, ages: Mapping[str, float]) -> int:
    """Count the tasks that would be deleted, up to ``MOST_COUNTED`` + 1, each status in the order of its index."""
    count = int(old[: MOST_COUNTED + 1].count())
    for status, days in ages.items():
        aged = outdated(tasks, {status: days}).filter(pk__lt=first_id_since(tasks.db, days * DAY))
        rows = in_status(aged, status).order_by(*([] if status == TaskStatus.SUCCESSFUL else ["status"]), "pk")
        count += int(rows[: MOST_COUNTED + 1].count())
    return min(count, MOST_COUNTED + 1)


def prune_window(using: str, after: int, ages: Mapping[str, float], *, batch: int = WINDOW) -> tuple[int, int]:
    """Delete expired tasks, and the outdated tasks of one window behind the id ``after``.

    For a caller that prunes one window from time to time. Returns how many tasks were deleted, and the id behind which
    to continue: 0 at the end of the table.
    """
    tasks = rows_of("Task", using)
    count = _delete_unless_refused(expired(tasks), batch)
    deleted, last = _prune_outdated(tasks, after, ages, batch)
    return count + deleted, last


def warn_of_references(using: str, known: set[str]) -> None:
    """Log the tables whose rows refuse the deletion of tasks, except for ``known`` tables. Add them to ``known``."""
    for table in sorted({table for table, _column in run(using, REFUSING_KEYS)} - known):
        logger.warning(
            "Old tasks to which rows of %s refer are not pruned. Give its foreign key ON DELETE in the database.", table
        )
        known.add(table)


def _prune_outdated(tasks: Any, after: int, ages: Mapping[str, float], batch: int) -> tuple[int, int]:
    """Delete the outdated tasks of the window behind ``after``. Return how many, and the last id of the window.

    The last id is 0 if no task behind ``after`` can be old enough.
    """
    [(last, is_young)] = run(tasks.db, NEXT_WINDOW, min(ages.values()) * DAY, after, batch) if ages else [(0, True)]
    if is_young or not last:
        return 0, 0
    return _delete_unless_refused(outdated(tasks, ages).filter(pk__gt=after, pk__lte=last), batch), last


def outdated(tasks: Any, ages: Mapping[str, float]) -> Any:
    """Return the unneeded finished tasks without ``keep_result`` that are older than ``ages``: days by status."""
    is_old = Q(pk__in=[])
    # The callers select a range of ids. The date is computed for each row, so that the planner cannot use the index of
    # dates instead. This is a BRIN index: PostgreSQL may then read all pages of the table.
    moment = Func(function="clock_timestamp", output_field=DateTimeField())
    for status, days in ages.items():
        is_old |= Q(status=status, finished_at__lte=moment - timedelta(days=days))
    return unneeded(tasks).filter(is_old, expires_at__isnull=True).order_by("pk")


def expired(tasks: Any) -> Any:
    """Return the unneeded finished tasks whose ``keep_result`` is over, the longest expired first."""
    return unneeded(tasks).filter(expires_at__lte=Now(), finished_at__isnull=False).order_by("expires_at")


def locking_old(tasks: Any, limit: int | None) -> tuple[str, tuple[Any, ...]]:
    """Return the statement that locks the first of these tasks that are not locked, and keeps their ids.

    Raises ``EmptyResultSet`` if nothing can match.
    """
    # FOR UPDATE, which locks the key as well. A claim or a settle locks the row without its key. A transaction that
    # enqueues a task with ``after=`` has locked the key of the awaited task, and then that task is still needed.
    selection, values = locking_sql(first_free(tasks, limit))
    # A condition of the project's own may have braces.
    selection = selection.replace("{", "{{").replace("}", "}}")
    return f"WITH old (id) AS MATERIALIZED ({selection}){KEEP_IDS}", values


def ages_of(older_than: float | None = None, statuses: Collection[str] = ()) -> dict[str, float]:
    """Return, by status, after how many days ``prune`` with these arguments deletes tasks. Raises ``ValueError``."""
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
    # A subquery instead of NOT EXISTS, which is a join: see UNAWAITED.
    waiters = rows_of("Waiter", tasks.db).filter(awaited=OuterRef("pk")).order_by().values("awaited")
    is_free = Q(unique_until__isnull=True) | Q(unique_key__isnull=True) | Q(unique_until__lte=Now())
    return unreferenced(tasks).filter(is_free, IsNull(Subquery(waiters[:1]), True))


def _delete_unless_refused(tasks: Any, limit: int) -> int:
    """Delete as ``delete_free`` does. Log it and return 0 if the database refuses it, so that pruning continues."""
    try:
        return delete_free(tasks, limit)
    except IntegrityError as error:
        if in_transaction(connection_for(tasks.db)):
            raise
        logger.warning("Some old tasks are not deleted, because the database refuses it: %s", one_line(error))
        return 0


def delete_free(tasks: Any, limit: int | None = None) -> int:
    """Delete up to ``limit`` of these tasks (None: all) that are not locked. Returns how many."""
    try:
        lock = locking_old(tasks, limit)
    except EmptyResultSet:
        # Django knows without a query that nothing can match.
        return 0
    [(count,)] = run(tasks.db, PRUNE, first=[lock])
    return int(count)


# The foreign keys from the project's tables to tasks that refuse a deletion, if this role may read their columns: the
# table and the column, with quoted names.
# Foreign keys of Django models have no ON DELETE in the database, whatever ``on_delete`` is. The database's own check
# at the end of the transaction needs no rights.
REFUSING_KEYS = """
SELECT conrelid::regclass::text, quote_ident(attname)
FROM pg_constraint JOIN pg_attribute ON attrelid = conrelid AND attnum = conkey[1]
WHERE contype = 'f' AND confrelid = to_regclass('{task}') AND confdeltype IN ('a', 'r') AND conparentid = 0
  AND has_column_privilege(conrelid, attnum, 'SELECT')
ORDER BY 1, 2
"""


def unreferenced(tasks: Any) -> Any:
    """Return the tasks to which no row of the project refers by such a foreign key. Reads the catalog."""
    for table, name in run(tasks.db, REFUSING_KEYS):
        column = f"referring.{name}"
        # A subquery instead of NOT EXISTS, which is a join, as ``statements.py`` says.
        names = f"SELECT {column} FROM {table} AS referring WHERE {column}".replace("%", "%%%%")
        template = f"({names} = %(expressions)s LIMIT 1) IS NULL"
        tasks = tasks.filter(Func(F("pk"), template=template, output_field=BooleanField()))
    return tasks
