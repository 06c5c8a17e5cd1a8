"""Which workers are alive: their rows and their heartbeats.

A worker is a process that runs tasks. Its parent beats for it, and the session of the parent holds an advisory lock,
whose number is in the rows of all its workers.

There are two signs that a worker lives: the heartbeat in its row, and the lock. A worker counts as dead only if both
are missing. So neither a restart of the server nor a lost connection makes a living worker count as dead. After the
hard limit (``HEARTBEAT_LIMIT``) the lock counts only while its session works, because a frozen process keeps its
session, and so does the server if a host has died. A session works while it waits for the end of a statement, and for
two heartbeats after that: a heartbeat cannot be written into a row that somebody has locked. Behind a pooler no parent
holds a lock, so only the heartbeat counts. A worker without a row is dead: it has ended in order, or its parent has
seen its death.

The server's clock may be put back, for example by a failover to a host that is behind. Then the heartbeats before that
are in the future, those of dead workers for as long as the step. So a date that is too far ahead of the clock is no
better than a date that is too old.

While the server cannot be reached, no worker can write a heartbeat. Afterwards the first parent that writes one finds
the heartbeats of all others missing, although these workers live. So who rescues is its own witness: a parent takes
back the tasks of another one only if its own heartbeats have come without interruption for as long as it has missed
those of the other one. The server's clock may also be put forward, so an interruption is a step of that clock as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db.models import Q
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now

from django_pglock.conf import get_settings
from django_pglock.keys.reserved import WORKER
from django_pglock.store.statements import IN_INDEX_ORDER, rows_of, run

#: The number of missing heartbeats after which a worker without a session is dead. A little more than two, because a
#: heartbeat may be in transit.
MISSING = 2.2
#: Intervals between two heartbeats after which a parent's heartbeats were interrupted: the server may have been
#: unreachable.
LATE = 1.5
#: The number of parents that do the upkeep often: the oldest ones. More than one, because one may freeze.
UPKEEP_PARENTS = 2


def is_recent(date: str) -> str:
    """Return the condition that a date is less than the next value, in seconds, away from the server's clock."""
    return f"abs(EXTRACT(EPOCH FROM clock_timestamp() - {date})) < %s"


# Writes the heartbeats of a parent's workers. The first heartbeat of a worker inserts its row, and so does the first
# one after its row was deleted, for example after an outage. The list of functions is long and rarely changes, so a
# heartbeat has it only if it has changed. A heartbeat without the list inserts no row.
#
# A row that another session has locked is left out, and its worker gets no answer. The statement must not wait: it also
# has the heartbeats of others. The answer has, for each worker: the number of functions in the row; whether the row
# says that the worker sleeps; how many older parents do the upkeep, where a parent is as old as its oldest worker; and
# whether heartbeats of other parents are missing. The rows are written in the order of their ids, so that two
# statements cannot deadlock.
#
# The heartbeats of all living workers of a parent are in one statement. So another row of this parent is of a worker
# that has ended, and is deleted: a heartbeat that was late may have inserted it again. Nobody else would find that this
# worker is dead, because its row has the lock of a living parent.
BEAT = f"""
WITH given AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(%s::jsonb) AS given (
        id uuid, parent uuid, name text, hostname text, pid integer, queues jsonb, threads integer, lock_key integer,
        is_stopping boolean, task_paths jsonb)
), mine AS MATERIALIZED (
    SELECT id FROM {{worker}} WHERE id = ANY (ARRAY(SELECT id FROM given)) ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
), gone AS MATERIALIZED (
    SELECT id FROM {{worker}}
    WHERE parent IN (SELECT parent FROM given) AND id NOT IN (SELECT id FROM given) FOR UPDATE SKIP LOCKED
), deleted AS (
    DELETE FROM {{worker}} WHERE id IN (SELECT id FROM gone)
), written AS (
    INSERT INTO {{worker}} AS worker (
        id, parent, name, hostname, pid, queues, threads, lock_key, is_stopping, task_paths)
    SELECT id, parent, name, hostname, pid, queues, threads, lock_key, is_stopping, COALESCE(task_paths, '[]')
    FROM given
    WHERE id IN (SELECT id FROM mine)
       OR task_paths IS NOT NULL AND NOT EXISTS (SELECT FROM {{worker}} AS known WHERE known.id = given.id) ORDER BY id
    ON CONFLICT (id) DO UPDATE
    SET heartbeat_at = clock_timestamp(), is_stopping = EXCLUDED.is_stopping, lock_key = EXCLUDED.lock_key,
        task_paths = COALESCE((SELECT task_paths FROM given WHERE given.id = worker.id), worker.task_paths)
    RETURNING worker.id, worker.parent, jsonb_array_length(worker.task_paths) AS known, worker.is_sleeping,
              worker.started_at
)
SELECT id, known, is_sleeping, older_parents, are_others_missing
FROM written CROSS JOIN (
    SELECT (
        SELECT count(*) FROM (
            SELECT DISTINCT older.parent FROM {{worker}} AS older
            WHERE older.parent <> oldest.parent AND older.started_at < oldest.started_at AND NOT older.is_stopping
              AND {is_recent("older.heartbeat_at")} LIMIT {UPKEEP_PARENTS}) AS older_parents) AS older_parents,
        EXISTS (SELECT FROM {{worker}} AS other WHERE other.parent <> oldest.parent
                  AND NOT {is_recent("other.heartbeat_at")}) AS are_others_missing
    FROM (SELECT parent, min(started_at) AS started_at FROM written GROUP BY parent) AS oldest) AS fleet
"""

# Deletes the rows of dead workers without running tasks. SKIP LOCKED, because the caller must not wait: it has tasks to
# rescue, and a person may have locked a row in a transaction that stays open. One probe of the index of running tasks
# for each dead worker: with NOT EXISTS, a join, the planner read all running tasks.
DELETE_DEAD = f"""
WITH dead AS MATERIALIZED (
    SELECT worker.id FROM {{worker}} AS worker
    WHERE NOT {is_recent("worker.heartbeat_at")}
      AND (SELECT task.worker FROM {{task}} AS task WHERE task.worker BETWEEN worker.id AND worker.id
             AND task.status = 'RUNNING' ORDER BY task.worker LIMIT 1) IS NULL
    FOR UPDATE OF worker SKIP LOCKED
)
DELETE FROM {{worker}} AS worker USING dead WHERE worker.id = dead.id RETURNING worker.id
"""


# The numbers of the locks that sessions hold for workers, and whether the session works: it waits for the end of a
# statement, or had the last one lately. The role of a worker cannot see this of the sessions of another role: NULL.
HELD_LOCKS = f"""
    SELECT lock.objid::bigint AS number,
           session.state = 'active' OR {is_recent("session.state_change")} AS is_working
    FROM pg_locks AS lock LEFT JOIN pg_stat_activity AS session ON session.pid = lock.pid
    WHERE lock.locktype = 'advisory' AND lock.objsubid = 2 AND lock.granted AND lock.classid = {WORKER}
      AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


class Beat(NamedTuple):
    """A heartbeat of one worker, with the values of its row.

    - ``lock_key``: the number of the advisory lock that the session of the parent holds; None: it holds none.
    - ``task_paths``: the functions that the worker knows, if they have changed or if the worker has no row.
    """

    id: UUID
    parent: UUID
    name: str
    hostname: str
    pid: int
    queues: list[str]
    threads: int
    is_stopping: bool
    lock_key: int | None = None
    task_paths: list[str] | None = None


class HeartbeatReply(NamedTuple):
    """The answer to a heartbeat."""

    #: How many functions the worker's row has.
    known: int
    #: Whether the row says that the worker sleeps.
    is_sleeping: bool
    #: The number of older parents that do the upkeep, ``UPKEEP_PARENTS`` at most.
    older_parents: int
    #: Whether heartbeats of workers of other parents are missing.
    are_others_missing: bool


def is_alive() -> Q:
    """Return the condition that a worker has sent a heartbeat within the hard limit."""
    limit = timedelta(seconds=get_settings().HEARTBEAT_LIMIT)
    return Q(heartbeat_at__gt=Now() - limit, heartbeat_at__lt=Now() + limit)


def alive(workers: Any) -> Any:
    """Return the workers that have sent a heartbeat within the hard limit."""
    return workers.filter(is_alive())


def works() -> Q:
    """Return the condition that a session that works holds the lock of a worker, whose heartbeat may not be written."""
    locks = RawSQL(f"SELECT number FROM ({HELD_LOCKS}) AS held WHERE is_working", [missing()])  # noqa: S611
    return Q(lock_key__in=locks)


def missing() -> float:
    """Return the seconds after which a worker has missed so many heartbeats that it is dead without a session."""
    return MISSING * get_settings().HEARTBEAT_INTERVAL


def silent_after() -> float:
    """Return the seconds without a heartbeat after which a worker is dead even if an idle session holds its lock.

    Upkeep runs once an interval, so the tasks of a frozen worker run elsewhere within ``HEARTBEAT_LIMIT``.
    """
    interval = get_settings().HEARTBEAT_INTERVAL
    return get_settings().HEARTBEAT_LIMIT - interval


def beat_values(beats: Iterable[Beat]) -> tuple[str, float, float]:
    """Return the values of ``BEAT`` for one heartbeat of each of these workers, which have the same parent."""
    given = json.dumps([{**each._asdict(), "id": str(each.id), "parent": str(each.parent)} for each in beats])
    return given, LATE * get_settings().HEARTBEAT_INTERVAL, missing()


def deregister(using: str, worker: UUID) -> None:
    """Delete the row of a worker that has ended in order."""
    rows_of("Worker", using).filter(pk=worker).delete()


def delete_dead(using: str, *, unbroken: float) -> int:
    """Delete the rows of dead workers that have no claims. Returns how many.

    ``unbroken``: for how many seconds the heartbeats of the caller have come without interruption.
    """
    limit = get_settings().HEARTBEAT_LIMIT
    return len(run(using, DELETE_DEAD, limit, first=IN_INDEX_ORDER)) if unbroken >= limit else 0


#: Takes the advisory lock of a parent: false if another session has it. While its session holds it, missing heartbeats
#: are tolerated for longer.
LOCK_PARENT = f"SELECT pg_try_advisory_lock({WORKER}, %s)"
