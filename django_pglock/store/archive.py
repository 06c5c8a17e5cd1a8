"""Finished tasks are moved to the archive, whose days are dropped as whole partitions instead of deleted row by row.

Only tasks that have succeeded move, an hour after their end, and only those that pruning could delete as well: no task
waits for them, and their unique key is free. Tasks with ``keep_result`` stay, because their time differs from that of
their day. As pruning does, the move walks along the primary key, skips locked rows, and ends where all tasks are young.

A batch is one message and one transaction, which checks twice whether a task waits for one of them, as pruning does
(``prune.py``).
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

#: Seconds between the end of a task and its move. Most readers of a result have read it by then.
AGE = 3600.0
#: Tasks that one batch reads.
MOVED_AT_ONCE = 1000

#: The columns that the task and its row in the archive have in common.
COLUMNS = (
    "id, status, queue, priority, task_path, args, kwargs, backend, retries, max_retries, attempts, uncounted, "
    "rescues, worker, lock_key, concurrency, group_key, fair_key, unique_key, cancel_requested_at, run_after, "
    "enqueued_at, started_at, last_attempted_at, finished_at, progress, result, log, meta"
)
#: What is kept of a failed or lost attempt.
ATTEMPT = "number, worker, worker_name, started_at, finished_at, outcome, exception_path, traceback, log"

# Where the next batch ends, whether all tasks in it were enqueued less than so many seconds ago, and on which days, by
# UTC, those have ended that may be old enough and are not too old.
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
    """Move the tasks of the one window behind the id ``after`` that are old enough, but not older than ``days``.

    Tasks that are older are left to pruning. ``days``: None for no such limit. ``age``: seconds since their end.
    Returns how many tasks were moved, and the id behind which to continue: 0 when the walk has ended. Call it outside
    of a transaction.
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
    """Move those of these tasks that have ended on these days, and that nobody has locked."""
    on_days = RawSQL(
        "(finished_at AT TIME ZONE 'UTC')::date = ANY (%s::date[])",
        ("{" + ",".join(map(str, days)) + "}",),
        output_field=BooleanField(),
    )
    # Two workers would each skip what the other has locked, and would do the same work.
    is_my_turn = RawSQL("(SELECT is_mine FROM turn)", (), output_field=BooleanField())
    turn = f"turn (is_mine) AS MATERIALIZED (SELECT pg_try_advisory_xact_lock({UPKEEP}, 1)), "
    lock = locking_old(tasks.filter(on_days, is_my_turn), batch, turn)
    [(count,)] = run_together(using, (LIMIT_MOVE, ()), lock, (MOVE_TO_ARCHIVE, ()))
    return int(count)
