"""Which workers are alive: their rows and their heartbeats.

There are two signs that a worker lives: the heartbeat in its row, and a session that holds the worker's own advisory
lock. A worker counts as dead only if both are missing. So neither a restart of the server nor a lost connection makes a
living worker count as dead. After the hard limit (``HEARTBEAT_LIMIT``) the lock counts only while its session works,
because a frozen process keeps its session, and so does the server if a host has died. A session works while it waits
for the end of a statement, and for two heartbeats after that: a heartbeat cannot be written into a row that somebody
has locked. Behind a pooler no worker holds a lock, so only the heartbeat counts. A worker without a row is dead: it has
ended in order, or its heartbeat process has noticed its death and deleted the row.

The server's clock may be put back, for example by a failover to a host that is behind. Then the heartbeats before that
are in the future, those of dead workers for as long as the step. So a date that is too far ahead of the clock is no
better than a date that is too old.

While the server cannot be reached, no worker can write a heartbeat. Afterwards the first worker that writes one finds
the heartbeats of all others missing, although these workers live. So missing heartbeats prove a death only while there
is a witness: another worker whose heartbeats have come without interruption for so long that each living worker would
have written one, too.
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
from django_pglock.keys.reserved import UPKEEP, WORKER
from django_pglock.postgres.connections import backend_pid, connection_for
from django_pglock.store.statements import BY_INDEX, rows_of, run, run_by_index
from django_pglock.store.wake import WOKEN_FIRST

#: The number of missing heartbeats after which a worker without a session is dead. A little more than two, because a
#: heartbeat may be in transit.
MISSING = 2.2
#: Intervals after which a heartbeat is late. Then the server may have been unreachable, so the worker is no witness.
LATE = 1.5
#: Intervals without a late heartbeat after which a worker is a witness. More than ``LATE``, so that a single heartbeat
#: is not enough. Less than two rounds of upkeep, so that a new worker rescues in its third round.
WITNESS_AFTER = 1.75
#: Intervals between two heartbeats of a resting worker. While it rests, it is neither a witness nor an upkeep worker.
REST_INTERVALS = 3
#: A worker may rest only if at least this number of older workers beat in each interval. It is rare that so many
#: workers freeze or are killed at the same time.
LEAST_FREQUENT = 8
#: A worker may rest only if there are at least this number of further workers. If all workers that beat in each
#: interval are killed nevertheless, one of these soon notices it.
LEAST_OTHERS = 6
#: A worker beats in each interval if its heartbeat is at most this old, in intervals. Otherwise it may be dead.
IN_TIME = 1.2
#: The number of upkeep workers: the oldest workers, which do the upkeep often. More than one, because one may freeze.
UPKEEP_WORKERS = 2


def is_recent(date: str) -> str:
    """Return the condition that a date is less than the next value, in seconds, away from the server's clock."""
    return f"abs(EXTRACT(EPOCH FROM clock_timestamp() - {date})) < %s"


# An older worker that itself beats in each interval.
_OLDER = f"""(older.started_at, older.id) < (worker.started_at, worker.id) AND NOT older.is_stopping
          AND older.beating_since < older.heartbeat_at
          AND {is_recent("older.heartbeat_at")}"""
# Whether enough older workers beat in each interval, and there are enough further workers. If all older workers that
# beat in each interval are on one host, a worker may rest only on this host. So after the loss of a host, the resting
# workers of the other hosts still have a witness.
_HAS_ENOUGH_OLDER_WORKERS = f"""
    SELECT count(*) >= {LEAST_FREQUENT} + {LEAST_OTHERS} AND count(*) FILTER (WHERE is_often) >= {LEAST_FREQUENT} AND (
        min(hostname) FILTER (WHERE is_often) < max(hostname) FILTER (WHERE is_often)
        OR min(hostname) FILTER (WHERE is_often) = worker.hostname)
    FROM (SELECT older.hostname, {_OLDER} AS is_often FROM {{worker}} AS older
          WHERE {is_recent("older.heartbeat_at")}) AS older_workers"""
# A worker that waits for notifications about the same queues as the worker that beats.
_SLEEPING = f"""sleeping.is_sleeping AND NOT sleeping.is_stopping AND sleeping.queues = worker.queues
        AND {is_recent("sleeping.heartbeat_at")}"""

# Writes heartbeats. The first heartbeat of a worker inserts its row, and so does the first one after its row was
# deleted, for example after an outage. The list of functions is long and rarely changes, so a heartbeat has it only if
# it has changed. A heartbeat without the list inserts no row: a supervisor that hangs may send one after the process
# has ended and deleted its row.
#
# A row that another session has locked is left out, and its worker gets no answer. The statement must not wait: it also
# has the heartbeats of others, and while it waits nobody takes notifications from the session.
#
# ``beating_since`` restarts with a heartbeat that is late or comes from a new session, or if the clock was put back.
# The answer has: the number of functions in the row; whether the row says that the worker sleeps; the number of older
# workers that can do the upkeep; the number of sleeping workers of the same queues, of the older ones and of all; and
# whether enough older workers beat in each interval. An older worker cannot do the upkeep if its heartbeat process
# writes its heartbeats, or if it rests. Its ``beating_since`` is then not before ``heartbeat_at``. The rows are written
# in the order of their ids, so that two statements cannot deadlock.
#
# The oldest workers, and the oldest sleeping workers of each set of queues, have too few older workers, so they never
# rest. These are the workers that are counted. A resting worker counts only as one of all sleeping workers.
BEAT = f"""
WITH given AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(%s::jsonb) AS given (
        id uuid, name text, hostname text, pid integer, queues jsonb, threads integer, lock_key integer,
        is_stopping boolean, is_interrupted boolean, task_paths jsonb)
), mine AS MATERIALIZED (
    SELECT id FROM {{worker}} WHERE id = ANY (ARRAY(SELECT id FROM given)) ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
)
INSERT INTO {{worker}} AS worker (id, name, hostname, pid, queues, threads, lock_key, is_stopping, task_paths)
SELECT id, name, hostname, pid, queues, threads, lock_key, is_stopping, COALESCE(task_paths, '[]')
FROM given
WHERE id IN (SELECT id FROM mine)
   OR task_paths IS NOT NULL AND NOT EXISTS (SELECT FROM {{worker}} AS known WHERE known.id = given.id) ORDER BY id
ON CONFLICT (id) DO UPDATE
SET heartbeat_at = clock_timestamp(), is_stopping = EXCLUDED.is_stopping, lock_key = EXCLUDED.lock_key,
    beating_since = CASE WHEN (SELECT is_interrupted FROM given WHERE given.id = worker.id)
                           OR NOT {is_recent("worker.heartbeat_at")}
                         THEN clock_timestamp() ELSE worker.beating_since END,
    task_paths = COALESCE((SELECT task_paths FROM given WHERE given.id = worker.id), worker.task_paths)
RETURNING worker.id, jsonb_array_length(worker.task_paths), worker.is_sleeping, (
    SELECT count(*) FROM (
        SELECT FROM {{worker}} AS older WHERE {_OLDER} LIMIT {UPKEEP_WORKERS}) AS older_workers), (
    SELECT count(*) FROM (
        SELECT FROM {{worker}} AS sleeping
        WHERE (sleeping.started_at, sleeping.id) < (worker.started_at, worker.id)
          AND {_SLEEPING} LIMIT {WOKEN_FIRST}) AS older_sleeping_workers), (
    SELECT count(*) FROM (
        SELECT FROM {{worker}} AS sleeping WHERE {_SLEEPING} LIMIT {WOKEN_FIRST} + 1) AS sleeping_workers),
    ({_HAS_ENOUGH_OLDER_WORKERS})
"""


# One worker whose heartbeats have come without interruption for so long that each living worker has sent one, too.
WITNESS = f"""witness AS MATERIALIZED (
    SELECT worker.id FROM {{worker}} AS worker
    WHERE {is_recent("worker.heartbeat_at")}
      AND worker.beating_since <= clock_timestamp() - make_interval(secs => %s) LIMIT 1
)"""

# Deletes the rows of dead workers without running tasks, if there is a witness. SKIP LOCKED, because the caller must
# not wait: it has tasks to rescue, and a person may have locked a row in a transaction that stays open. One probe of
# the index of running tasks for each dead worker: with NOT EXISTS, a join, the planner read all running tasks.
DELETE_DEAD = f"""
WITH {WITNESS}, dead AS MATERIALIZED (
    SELECT worker.id FROM {{worker}} AS worker
    WHERE NOT {is_recent("worker.heartbeat_at")} AND EXISTS (SELECT FROM witness)
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

    - ``lock_key``: the number of the advisory lock that a session holds for the worker; None: no session does.
    - ``is_interrupted``: whether the session of the previous heartbeat was lost.
    - ``task_paths``: the functions that the worker knows, if they have changed or if the worker has no row.
    """

    id: UUID
    name: str
    hostname: str
    pid: int
    queues: list[str]
    threads: int
    is_stopping: bool
    lock_key: int | None = None
    is_interrupted: bool = False
    task_paths: list[str] | None = None


class HeartbeatReply(NamedTuple):
    """The answer to a heartbeat."""

    #: How many functions the worker's row has.
    known: int
    #: Whether the row says that the worker sleeps.
    is_sleeping: bool
    #: The number of older workers that can do the upkeep, ``UPKEEP_WORKERS`` at most.
    older_workers: int
    #: The number of older sleeping workers that serve the same queues, ``WOKEN_FIRST`` at most.
    older_sleeping_workers: int
    #: The number of all sleeping workers that serve the same queues, at most one more than ``WOKEN_FIRST``.
    sleeping_workers: int
    #: Whether enough older workers beat in each interval, and there are enough further workers.
    has_enough_older_workers: bool

    @property
    def may_rest(self) -> bool:
        """Whether the worker may rest while nothing is in flight: older workers are witnesses and are woken first."""
        return self.has_enough_older_workers and self.older_sleeping_workers >= WOKEN_FIRST


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


def witness_values() -> tuple[float, float]:
    """Return the values of ``WITNESS``, in seconds."""
    interval = get_settings().HEARTBEAT_INTERVAL
    return LATE * interval, WITNESS_AFTER * interval


def silent_after() -> float:
    """Return the seconds without a heartbeat after which a worker is dead even if an idle session holds its lock.

    Upkeep runs once an interval, so the tasks of a frozen worker run elsewhere within ``HEARTBEAT_LIMIT``.
    """
    interval = get_settings().HEARTBEAT_INTERVAL
    return get_settings().HEARTBEAT_LIMIT - interval


def beat(using: str, worker: UUID, **values: Any) -> HeartbeatReply:
    """Write a heartbeat of one worker; the first one registers it. ``values`` are the other fields of ``Beat``."""
    answers = beat_all(using, [Beat(worker, **values)])
    return answers[worker] if answers else beat(using, worker, **{**values, "task_paths": []})


def beat_all(using: str, beats: Iterable[Beat]) -> dict[UUID, HeartbeatReply]:
    """Write one heartbeat of each of several workers, in one statement. Return the answers by the workers' ids.

    A worker gets no answer if it has no row and its heartbeat has no list of functions, or if its row is locked.
    """
    given = json.dumps([{**each._asdict(), "id": str(each.id)} for each in beats])
    interval = get_settings().HEARTBEAT_INTERVAL
    late = LATE * interval
    values = (given, late, late, late, REST_INTERVALS * late, IN_TIME * interval, REST_INTERVALS * late)
    return {worker: HeartbeatReply(*answer) for worker, *answer in run(using, BEAT, *values)}


def deregister(using: str, worker: UUID) -> None:
    """Delete the row of a worker that has ended in order."""
    rows_of("Worker", using).filter(pk=worker).delete()


def delete_dead(using: str) -> int:
    """Delete the rows of dead workers that have no claims. Returns how many."""
    return len(run_by_index(using, DELETE_DEAD, *witness_values(), get_settings().HEARTBEAT_LIMIT))


def is_oldest(using: str, worker: UUID) -> bool:
    """Return whether this is the oldest living worker.

    The oldest worker writes the log records that only one worker should write.
    """
    oldest = alive(rows_of("Worker", using)).order_by("started_at", "pk").values_list("pk", flat=True).first()
    return bool(oldest == worker)


# The advisory locks of workers: one that a session of each worker holds, and one of a round of upkeep.
#
# While the worker's lock is held, missing heartbeats are tolerated for longer. One worker at a time does a round, which
# is one transaction.


#: Takes the worker's lock. NULL behind a pooler: there the lock would stay in a session that other clients use. CASE,
#: because the server must compare the process numbers before it tries to take the lock.
LOCK_WORKER = "SELECT CASE WHEN pg_backend_pid() = %s THEN pg_try_advisory_lock(%s, %s) END"
UNLOCK_WORKER = "SELECT pg_advisory_unlock(%s, %s)"


def lock_worker(using: str, number: int) -> bool | None:
    """Take the lock of this number in the present session. False: another session has it. None: behind a pooler."""
    [(is_held,)] = run(using, LOCK_WORKER, backend_pid(connection_for(using)), WORKER, number)
    return is_held  # type: ignore[no-any-return]


def unlock_worker(using: str, number: int) -> None:
    """Release the lock, which the present session holds."""
    run(using, UNLOCK_WORKER, WORKER, number)


#: The first statement of a round. It tries to take the lock, and limits how long the session may be idle in the
#: transaction. Both end with the transaction, so they work behind a pooler as well.
TRY_UPKEEP_LOCK = f"""
SELECT pg_try_advisory_xact_lock({UPKEEP}, 0), set_config('idle_in_transaction_session_timeout', '3s', true), {BY_INDEX}
"""


def try_upkeep_lock(using: str) -> bool:
    """Try to take the lock until the end of the current transaction. Return whether it was free."""
    [(is_taken, *_settings)] = run(using, TRY_UPKEEP_LOCK)
    return bool(is_taken)
