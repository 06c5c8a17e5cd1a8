"""Moves finished tasks to the archive. Old days are dropped there as whole partitions, not deleted row by row.

Only successful tasks are moved, an hour after their end, and only tasks that pruning could delete: no task waits for
them, and their unique key is free. Tasks with ``keep_result`` stay, because each has its own expiry date, and a
partition is dropped as a whole. Like pruning, the move reads along the primary key, skips locked rows, and stops where
all tasks are young.

A batch is one message and one transaction. Like pruning (``prune.py``), it checks twice whether a task waits for one of
the batch.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import date
from typing import Any

from django.db.models import BooleanField
from django.db.models.expressions import RawSQL

from django_pglock.conf import MOST_DAYS
from django_pglock.keys.reserved import UPKEEP
from django_pglock.store.archive_days import create_days
from django_pglock.store.prune import DAY, UNAWAITED, locking_old, unneeded
from django_pglock.store.statements import BY_INDEX, rows_of, run, run_together
from django_pglock.tasks.states import TaskStatus

#: Seconds between the end of a task and its move. After that time most results have been read.
AGE = 3600.0
#: Tasks that one batch reads.
MOVED_AT_ONCE = 1000

#: The columns that the task and its row in the archive have in common.
COLUMNS = (
    "id, status, queue, priority, task_path, args, kwargs, backend, retries, max_retries, attempts, uncounted, "
    "rescues, worker, lock_key, concurrency, group_key, fair_key, unique_key, cancel_requested_at, run_after, "
    "enqueued_at, started_at, last_attempted_at, finished_at, progress, result, log, meta"
)
#: The columns of a failed or lost attempt that are archived.
ATTEMPT = "number, worker, worker_name, started_at, finished_at, outcome, exception_path, traceback, log"

# The end of the next batch; whether all tasks in it were enqueued less than a number of seconds ago; and the days, in
# UTC, on which tasks ended that may be old enough and are not too old.
NEXT_TO_ARCHIVE = """
SELECT max(id), bool_and(enqueued_at > clock_timestamp() - make_interval(secs => %s)),
       array_agg(DISTINCT (finished_at AT TIME ZONE 'UTC')::date) FILTER (
           WHERE status = 'SUCCESSFUL' AND expires_at IS NULL
             AND finished_at BETWEEN clock_timestamp() - make_interval(secs => %s)
                                 AND clock_timestamp() - make_interval(secs => %s))
FROM (SELECT id, status, enqueued_at, finished_at, expires_at FROM {task} WHERE id > %s ORDER BY id LIMIT %s) AS page
"""

# The limits of a batch, in which all tables are read by index, whatever the statistics say.
LIMIT_MOVE = f"""
SELECT {BY_INDEX}, set_config('enable_seqscan', 'off', true), set_config('lock_timeout', '1s', true),
       set_config('statement_timeout', '3s', true)
"""

# Moves the locked tasks for which no task waits, with their failed and lost attempts. The subquery sees the attempts
# although the same statement deletes them, because all parts of a statement have one snapshot.
MOVE_TO_ARCHIVE = f"""
{UNAWAITED}, gone AS (
    DELETE FROM {{task}} WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING {COLUMNS}
), kept AS (
    INSERT INTO {{archived_task}} ({COLUMNS}, failed_attempts)
    SELECT {COLUMNS}, CASE WHEN attempts > 1 THEN (
        SELECT jsonb_agg(to_jsonb(attempt) ORDER BY attempt.number)
        FROM (SELECT {ATTEMPT} FROM {{attempt}} WHERE task_id = gone.id) AS attempt
    ) END
    FROM gone RETURNING id
)
SELECT count(*) FROM kept
"""


def archive_window(
    using: str, after: int, days: float | None, *, age: float = AGE, batch: int = MOVED_AT_ONCE
) -> tuple[int, int]:
    """Move tasks of one window, which begins behind the id ``after``: those that ended at least ``age`` seconds ago.

    Tasks older than ``days`` are not moved, because pruning deletes them. ``days``: None for no such limit. Returns how
    many tasks were moved, and the id behind which to continue: 0 at the end of the table. Call it outside of a
    transaction.
    """
    oldest = (MOST_DAYS if days is None else days) * DAY
    [(last, is_young, found)] = run(using, NEXT_TO_ARCHIVE, age, oldest, age, after, batch)
    if is_young or last is None:
        return 0, 0
    if not found:
        return 0, last
    there = set(create_days(using, found).days)
    wanted = [day for day in found if day in there]
    tasks = movable(using, days, age=age).filter(pk__gt=after, pk__lte=last)
    return (_move(using, tasks, wanted, batch) if wanted else 0), last


def movable(using: str, days: float | None, *, age: float = AGE) -> Any:
    """Return the tasks that may be moved now; ``days`` and ``age`` as in ``archive_window``."""
    is_old = RawSQL(
        "finished_at BETWEEN clock_timestamp() - make_interval(secs => %s) "
        "AND clock_timestamp() - make_interval(secs => %s)",
        ((MOST_DAYS if days is None else days) * DAY, age),
        output_field=BooleanField(),
    )
    tasks = rows_of("Task", using).filter(status=TaskStatus.SUCCESSFUL, expires_at__isnull=True)
    return unneeded(tasks).filter(is_old).order_by("pk")


def _move(using: str, tasks: Any, days: Collection[date], batch: int) -> int:
    """Move the tasks that ended on these days and that no other transaction has locked."""
    on_days = RawSQL(
        "(finished_at AT TIME ZONE 'UTC')::date = ANY (%s::date[])",
        ("{" + ",".join(map(str, days)) + "}",),
        output_field=BooleanField(),
    )
    # Only one worker at a time moves tasks. Two would do the same work, and each would skip the rows of the other.
    has_lock = RawSQL("(SELECT is_held FROM archive_lock)", (), output_field=BooleanField())
    archive_lock = f"archive_lock (is_held) AS MATERIALIZED (SELECT pg_try_advisory_xact_lock({UPKEEP}, 1)), "
    lock = locking_old(tasks.filter(on_days, has_lock), batch, archive_lock)
    [(count,)] = run_together(using, (LIMIT_MOVE, ()), lock, (MOVE_TO_ARCHIVE, ()))
    return int(count)
