"""Which workers are alive: their rows and their heartbeats.

A worker shows that it lives in two ways: by a heartbeat in its row, and by a session that holds an advisory lock of its
own. Rescue needs both to be gone, so that neither a restarted server nor a cut connection condemns a living worker.
After the hard limit (``HEARTBEAT_LIMIT``) the heartbeat alone decides, because a frozen process keeps its session, and
behind a pooler no worker holds a lock. A worker without a row is dead: it has ended in order, or its heartbeat process
has seen it die.

While the server is out of reach all workers are silent, and afterwards one of them is the first to come back. So
silence proves a death only while there is a witness: another worker whose heartbeats have come without interruption for
so long that the silent ones would have come back, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db.models.functions import Now

from django_pglock.conf import get_settings
from django_pglock.store.sql import rows_of, run
from django_pglock.store.wake import WOKEN_FIRST

#: Missing heartbeats after which a worker without a session is dead. A little more than two, because a heartbeat may be
#: in transit.
MISSING = 2.2
#: Intervals after which a heartbeat is late: the server may be out of reach at that moment.
LATE = 1.5
#: Intervals without a late heartbeat that make a witness: more than ``LATE``, so that one heartbeat alone proves
#: nothing; less than two rounds of upkeep, so that a new worker rescues in its third round.
WITNESS_AFTER = 1.75
#: Intervals between two heartbeats of a worker that rests. It is no witness then, nor on duty.
REST_INTERVALS = 3
#: The least number of older workers that beat in each interval, for a worker to rest: so many seldom freeze or are
#: killed all at once.
LEAST_FREQUENT = 8
#: The least number of other workers. If all frequent ones are killed nevertheless, one of these notices it soon.
LEAST_OTHERS = 6
#: The greatest age of a frequent worker's heartbeat, in intervals. If it is older, the worker may be dead.
IN_TIME = 1.2
#: The least ``HEARTBEAT_LIMIT``, in intervals, for a worker to rest: a late beat must not be taken for a death.
LEAST_LIMIT = 2 * REST_INTERVALS
#: The least number of frequent older workers on the host of the worker that rests, unless they are on two hosts. After
#: the loss of a host, one of them is still a witness.
LEAST_ON_HOST = 2
#: The number of workers that do the upkeep often, the oldest ones: more than one, because one may freeze.
UPKEEP_WORKERS = 2

# An older worker that beats in each interval, by itself.
_OLDER = """(older.started_at, older.id) < (worker.started_at, worker.id) AND NOT older.is_stopping
          AND older.beating_since < older.heartbeat_at
          AND older.heartbeat_at > clock_timestamp() - make_interval(secs => %s)"""
# Whether enough older workers beat often, and there are enough others.
_HAS_ENOUGH_OLDER_WORKERS = f"""
    SELECT count(*) >= {LEAST_FREQUENT} + {LEAST_OTHERS} AND count(*) FILTER (WHERE is_often) >= {LEAST_FREQUENT} AND (
        min(hostname) FILTER (WHERE is_often) < max(hostname) FILTER (WHERE is_often)
        OR count(*) FILTER (WHERE is_often AND hostname = worker.hostname) >= {LEAST_ON_HOST})
    FROM (SELECT older.hostname, {_OLDER} AS is_often FROM {{worker}} AS older
          WHERE older.heartbeat_at > clock_timestamp() - make_interval(secs => %s)) AS older_workers"""
# A worker that waits for notifications about the same queues as the worker that beats.
_SLEEPING = """sleeping.is_sleeping AND NOT sleeping.is_stopping AND sleeping.queues = worker.queues
        AND sleeping.heartbeat_at > clock_timestamp() - make_interval(secs => %s)"""

# Registers workers at their first heartbeat, and again if their rows were removed while they were out of reach. The
# functions are many and seldom change, so they are sent only when they have changed. Only a heartbeat that names them
# registers: a supervisor that hangs may send one after the process has ended and removed its row.
#
# The heartbeats are continuous until one comes late, or in a new session. The answer says how many functions the row
# has, whether those who enqueue believe that the worker sleeps, and how many older workers can do the upkeep; and how
# many workers of the same queues sleep, older ones and all; and whether enough older workers beat often. One whose
# heartbeats are written by its heartbeat process, or come rarely, cannot do the upkeep: there, ``beating_since`` is not
# before ``heartbeat_at``. In the order of the ids: two statements that write the same rows do not wait for each other
# in a circle.
#
# The oldest workers have too few older ones, so they always beat often, and so do the oldest that sleep for some
# queues. They are the ones that are counted: a worker that beats rarely counts only among all that sleep.
BEAT = f"""
WITH given AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(%s::jsonb) AS given (
        id uuid, name text, hostname text, pid integer, queues jsonb, threads integer, lock_key integer,
        is_stopping boolean, is_interrupted boolean, task_paths jsonb)
)
INSERT INTO {{worker}} AS worker (id, name, hostname, pid, queues, threads, lock_key, is_stopping, task_paths)
SELECT id, name, hostname, pid, queues, threads, lock_key, is_stopping, COALESCE(task_paths, '[]')
FROM given
WHERE task_paths IS NOT NULL OR EXISTS (SELECT FROM {{worker}} AS known WHERE known.id = given.id) ORDER BY id
ON CONFLICT (id) DO UPDATE
SET heartbeat_at = clock_timestamp(), is_stopping = EXCLUDED.is_stopping, lock_key = EXCLUDED.lock_key,
    beating_since = CASE WHEN (SELECT is_interrupted FROM given WHERE given.id = worker.id)
                           OR worker.heartbeat_at < clock_timestamp() - make_interval(secs => %s)
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


# One worker whose heartbeats have come without interruption for so long that all living ones have sent one, too.
WITNESS = """witness AS MATERIALIZED (
    SELECT worker.id FROM {worker} AS worker
    WHERE worker.heartbeat_at > clock_timestamp() - make_interval(secs => %s)
      AND worker.beating_since <= clock_timestamp() - make_interval(secs => %s) LIMIT 1
)"""

# Removes the rows of workers that are silent and own nothing, if there is a witness. SKIP LOCKED, because the caller
# has tasks to rescue, and a person may have locked a row in a transaction that stays open.
FORGET_DEAD = f"""
WITH {WITNESS}, forgotten AS MATERIALIZED (
    SELECT worker.id FROM {{worker}} AS worker
    WHERE worker.heartbeat_at <= clock_timestamp() - make_interval(secs => %s) AND EXISTS (SELECT FROM witness)
      AND NOT EXISTS (SELECT FROM {{task}} AS task WHERE task.worker = worker.id AND task.status = 'RUNNING')
    FOR UPDATE OF worker SKIP LOCKED
)
DELETE FROM {{worker}} AS worker USING forgotten WHERE worker.id = forgotten.id RETURNING worker.id
"""


class Beat(NamedTuple):
    """A heartbeat of one worker, with the values of its row.

    - ``lock_key``: the number of the advisory lock that a session holds for it; None: no session does.
    - ``is_interrupted``: the session of the heartbeat before was lost.
    - ``task_paths``: the functions that it knows, if they have changed, or if the worker has no row.
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
    #: How many workers have run for longer and can do the upkeep, ``UPKEEP_WORKERS`` at most.
    older_workers: int
    #: How many of the workers that serve the same queues and have run for longer sleep, ``WOKEN_FIRST`` at most.
    older_sleeping_workers: int
    #: How many workers that serve the same queues sleep, at most one more than ``WOKEN_FIRST``.
    sleeping_workers: int
    #: Whether enough older workers beat often, and there are enough others.
    has_enough_older_workers: bool

    @property
    def may_rest(self) -> bool:
        """Whether the worker may rest while it has nothing in flight: others are witnesses and are woken first."""
        return self.has_enough_older_workers and self.older_sleeping_workers >= WOKEN_FIRST


def alive(workers: Any) -> Any:
    """Workers that have sent a heartbeat within the hard limit."""
    return workers.filter(heartbeat_at__gt=_ago(get_settings().HEARTBEAT_LIMIT))


def silent(workers: Any) -> Any:
    """Workers that have sent no heartbeat for longer than the hard limit."""
    return workers.filter(heartbeat_at__lte=_ago(get_settings().HEARTBEAT_LIMIT))


def witness_values() -> tuple[float, float]:
    """Return the values of ``WITNESS``, in seconds."""
    interval = get_settings().HEARTBEAT_INTERVAL
    return LATE * interval, WITNESS_AFTER * interval


def silent_after() -> float:
    """Return the seconds without a heartbeat after which a worker is dead, whatever sessions there are.

    This is early enough to run the tasks of a frozen worker elsewhere within the limit: upkeep runs once an interval.
    """
    interval = get_settings().HEARTBEAT_INTERVAL
    return max(MISSING * interval, get_settings().HEARTBEAT_LIMIT - interval)


def beat(using: str, worker: UUID, **values: Any) -> HeartbeatReply:
    """Write a heartbeat of one worker; the first one registers it. ``values`` are the other fields of ``Beat``."""
    answers = beat_all(using, [Beat(worker, **values)])
    return answers[worker] if answers else beat(using, worker, **{**values, "task_paths": []})


def beat_all(using: str, beats: Iterable[Beat]) -> dict[UUID, HeartbeatReply]:
    """Write heartbeats of several workers, one each, in one statement. Return the answers by the workers' ids.

    A worker without a row gets no answer if its heartbeat does not name its functions.
    """
    given = json.dumps([{**each._asdict(), "id": str(each.id)} for each in beats])
    interval = get_settings().HEARTBEAT_INTERVAL
    late = LATE * interval
    values = (given, late, late, late, REST_INTERVALS * late, IN_TIME * interval, REST_INTERVALS * late)
    return {worker: HeartbeatReply(*answer) for worker, *answer in run(using, BEAT, *values)}


def deregister(using: str, worker: UUID) -> None:
    """Remove the row of a worker that stopped in order."""
    rows_of("Worker", using).filter(pk=worker).delete()


def delete_dead(using: str) -> int:
    """Remove the rows of workers that are dead and have no claims any more. Returns how many."""
    return len(run(using, FORGET_DEAD, *witness_values(), get_settings().HEARTBEAT_LIMIT))


def is_oldest(using: str, worker: UUID) -> bool:
    """Say whether this worker has run for longest of those alive. So one of them writes what one of them should log."""
    oldest = alive(rows_of("Worker", using)).order_by("started_at", "pk").values_list("pk", flat=True).first()
    return bool(oldest == worker)


def _ago(seconds: float) -> Any:
    return Now() - timedelta(seconds=seconds)
