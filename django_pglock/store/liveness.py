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
from django_pglock.store.wake import PROMPT

#: Missing heartbeats after which a worker without a session is dead. A little more than two, because a heartbeat may be
#: in transit.
MISSING = 2.2
#: A heartbeat is late after so many intervals: the server may be out of reach at that moment.
LATE = 1.5
#: Intervals without a late heartbeat that make a witness: more than ``LATE``, so that one heartbeat alone proves
#: nothing; less than two rounds of upkeep, so that a new worker rescues in its third round.
SETTLED = 1.75
#: A worker that has nothing in flight may beat only each so many intervals, if so many elder workers beat in each one.
#: It is no witness then, nor on duty. Enough elder ones, so that they seldom freeze or are killed all at once.
RARELY, OFTEN = 3, 8
#: If all of them are killed nevertheless, one of the others has to notice it soon: there must be so many.
OTHERS = 6
#: A heartbeat of an elder worker that is older, in intervals, tells that it may be dead.
IN_TIME = 1.2
#: Only if ``HEARTBEAT_LIMIT`` is at least so many intervals: a late beat must not be taken for a death.
LEAST_LIMIT = 2 * RARELY
#: So many of them on its own host, or some on two hosts: after the loss of a host, a worker that is left is a witness.
ON_HOST = 2
#: So many workers do the upkeep often, those that have run for longest: more than one, because one may freeze.
ON_DUTY = 2

# An elder worker that beats in each interval, by itself.
_ELDER = """(elder.started_at, elder.id) < (worker.started_at, worker.id) AND NOT elder.is_stopping
          AND elder.beating_since < elder.heartbeat_at
          AND elder.heartbeat_at > clock_timestamp() - make_interval(secs => %s)"""
# Whether enough elder workers beat often, and there are enough others.
_HAS_ELDERS = f"""
    SELECT count(*) >= {OFTEN} + {OTHERS} AND count(*) FILTER (WHERE is_often) >= {OFTEN} AND (
        min(hostname) FILTER (WHERE is_often) < max(hostname) FILTER (WHERE is_often)
        OR count(*) FILTER (WHERE is_often AND hostname = worker.hostname) >= {ON_HOST})
    FROM (SELECT elder.hostname, {_ELDER} AS is_often FROM {{worker}} AS elder
          WHERE elder.heartbeat_at > clock_timestamp() - make_interval(secs => %s)) AS elders"""
# A worker that waits for notifications about the same queues as the worker that beats.
_SLEEPS = """sleeper.is_sleeping AND NOT sleeper.is_stopping AND sleeper.queues = worker.queues
        AND sleeper.heartbeat_at > clock_timestamp() - make_interval(secs => %s)"""

# Registers workers at their first heartbeat, and again if their rows were removed while they were out of reach. The
# functions are many and seldom change, so they are sent only when they have changed. Only a heartbeat that names them
# registers: a supervisor that hangs may send one after the process has ended and removed its row.
#
# The heartbeats are continuous until one comes late, or in a new session. The answer says how many functions the row
# has, whether those who enqueue believe that the worker sleeps, and how many elder workers can do the upkeep; and how
# many workers of the same queues sleep, elder ones and all; and whether enough elder workers beat often. One whose
# heartbeats are written by its heartbeat process, or come rarely, cannot do the upkeep: there, ``beating_since`` is not
# before ``heartbeat_at``. In the order of the ids: two statements that write the same rows do not wait for each other
# in a circle.
#
# The eldest workers have too few elder ones, so they always beat often, and so do the eldest that sleep for some
# queues. They are the ones that are counted: a worker that beats rarely counts only among all sleepers.
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
        SELECT FROM {{worker}} AS elder WHERE {_ELDER} LIMIT {ON_DUTY}) AS elders), (
    SELECT count(*) FROM (
        SELECT FROM {{worker}} AS sleeper
        WHERE (sleeper.started_at, sleeper.id) < (worker.started_at, worker.id)
          AND {_SLEEPS} LIMIT {PROMPT}) AS elders), (
    SELECT count(*) FROM (SELECT FROM {{worker}} AS sleeper WHERE {_SLEEPS} LIMIT {PROMPT} + 1) AS sleepers),
    ({_HAS_ELDERS})
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


class Beaten(NamedTuple):
    """What the answer to a heartbeat says."""

    #: How many functions the worker's row has.
    known: int
    #: Whether the row says that the worker sleeps.
    is_sleeping: bool
    #: How many workers have run for longer and can do the upkeep, ``ON_DUTY`` at most.
    elders: int
    #: How many of the workers that serve the same queues and have run for longer sleep, ``PROMPT`` at most.
    elder_sleepers: int
    #: How many workers that serve the same queues sleep, at most one more than ``PROMPT``.
    sleepers: int
    #: Whether enough elder workers beat often, and there are enough others.
    has_elders: bool

    @property
    def may_rest(self) -> bool:
        """Whether the worker may beat rarely while it has nothing in flight: others are witnesses and look at once."""
        return self.has_elders and self.elder_sleepers >= PROMPT


def alive(workers: Any) -> Any:
    """Workers that have sent a heartbeat within the hard limit."""
    return workers.filter(heartbeat_at__gt=_ago(get_settings().HEARTBEAT_LIMIT))


def silent(workers: Any) -> Any:
    """Workers that have sent no heartbeat for longer than the hard limit."""
    return workers.filter(heartbeat_at__lte=_ago(get_settings().HEARTBEAT_LIMIT))


def witness_values() -> tuple[float, float]:
    """Return the values of ``WITNESS``, in seconds."""
    interval = get_settings().HEARTBEAT_INTERVAL
    return LATE * interval, SETTLED * interval


def silent_after() -> float:
    """Return the seconds without a heartbeat after which a worker is dead, whatever sessions there are.

    This is early enough to run the tasks of a frozen worker elsewhere within the limit: upkeep runs once an interval.
    """
    interval = get_settings().HEARTBEAT_INTERVAL
    return max(MISSING * interval, get_settings().HEARTBEAT_LIMIT - interval)


def beat(using: str, worker: UUID, **values: Any) -> Beaten:
    """Write a heartbeat of one worker; the first one registers it. ``values`` are the other fields of ``Beat``."""
    answers = beat_all(using, [Beat(worker, **values)])
    return answers[worker] if answers else beat(using, worker, **{**values, "task_paths": []})


def beat_all(using: str, beats: Iterable[Beat]) -> dict[UUID, Beaten]:
    """Write heartbeats of several workers, one each, in one statement. Return the answers by the workers' ids.

    A worker without a row gets no answer if its heartbeat does not name its functions.
    """
    given = json.dumps([{**each._asdict(), "id": str(each.id)} for each in beats])
    interval = get_settings().HEARTBEAT_INTERVAL
    late = LATE * interval
    values = (given, late, late, late, RARELY * late, IN_TIME * interval, RARELY * late)
    return {worker: Beaten(*answer) for worker, *answer in run(using, BEAT, *values)}


def depart(using: str, worker: UUID) -> None:
    """Remove the row of a worker that stopped in order."""
    rows_of("Worker", using).filter(pk=worker).delete()


def forget_dead(using: str) -> int:
    """Remove the rows of workers that are dead and have no claims any more. Returns how many."""
    return len(run(using, FORGET_DEAD, *witness_values(), get_settings().HEARTBEAT_LIMIT))


def is_eldest(using: str, worker: UUID) -> bool:
    """Say whether this worker has run for longest of those alive. So one of them writes what one of them should log."""
    eldest = alive(rows_of("Worker", using)).order_by("started_at", "pk").values_list("pk", flat=True).first()
    return bool(eldest == worker)


def _ago(seconds: float) -> Any:
    return Now() - timedelta(seconds=seconds)
