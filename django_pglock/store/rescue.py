"""Rescue: takes claims back from dead workers."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from django_pglock.conf import get_settings
from django_pglock.store.admit import admit_on_commit
from django_pglock.store.liveness import HELD_LOCKS, WITNESS, is_recent, missing, silent_after, witness_values
from django_pglock.store.release import release_on_commit
from django_pglock.store.statements import run_by_index
from django_pglock.store.wake import wake
from django_pglock.tasks.states import FINISHED, TaskStatus

#: The number of rows that one statement selects by an array and joins. The planner may compare each pair.
RESCUED_AT_ONCE = 200
LOST_WITH_WORKER = "django_pglock.errors.WorkerLost"

_HELD = f"held AS MATERIALIZED ({HELD_LOCKS})"
# True if a session holds the worker's lock, or if ``lock_key`` is NULL: then the worker holds no lock, so the absence
# of a lock proves nothing.
_LOCK_IS_HELD = "(worker.lock_key IS NULL OR worker.lock_key IN (SELECT number FROM held))"

# The workers that have running tasks, and NULL after the last one. One probe of the index of running tasks finds the
# next worker, however many tasks a worker runs. Without BY_INDEX the planner may read all running tasks for each probe.
_BUSY = """busy (worker) AS (
    (SELECT task.worker FROM {task} AS task WHERE task.status = 'RUNNING' ORDER BY task.worker LIMIT 1)
    UNION ALL
    SELECT (SELECT task.worker FROM {task} AS task
            WHERE task.status = 'RUNNING' AND task.worker > busy.worker ORDER BY task.worker LIMIT 1)
    FROM busy WHERE busy.worker IS NOT NULL
)"""

# Takes claims back from dead workers. A worker is dead in three cases: it has no row; it has sent no heartbeat for the
# hard limit, and no session that works holds its lock; or it has missed two heartbeats, its row says that a session
# holds its lock, and no session does. While there is no witness (liveness.py), only a worker without a row is dead.
# Tasks of living workers are not read.
#
# The claims are selected on one snapshot, by id and attempt. If a task has been settled and claimed by another worker
# since then, its row has another attempt number, and it is not rescued. SKIP LOCKED, because a row that is being
# settled at this moment needs no rescue. A task whose cancel was requested does not run again.
RESCUE = f"""
WITH RECURSIVE {WITNESS}, {_HELD}, alive AS MATERIALIZED (
    SELECT worker.id FROM {{worker}} AS worker
    WHERE NOT EXISTS (SELECT FROM witness)
       OR {is_recent("worker.heartbeat_at")}
       OR ({is_recent("worker.heartbeat_at")} AND {_LOCK_IS_HELD})
       OR worker.lock_key IN (SELECT number FROM held WHERE is_working)
), {_BUSY}, dead AS MATERIALIZED (
    SELECT busy.worker FROM busy
    WHERE busy.worker IS NOT NULL AND NOT EXISTS (SELECT FROM alive WHERE alive.id = busy.worker)
), orphan AS MATERIALIZED (
    SELECT owned.id, owned.attempts, owned.worker FROM dead CROSS JOIN LATERAL (
        SELECT task.id, task.attempts, task.worker FROM {{task}} AS task
        WHERE task.status = 'RUNNING' AND task.worker BETWEEN dead.worker AND dead.worker
        ORDER BY task.worker, task.id LIMIT %s) AS owned
    ORDER BY owned.id LIMIT %s
), mine AS MATERIALIZED (
    SELECT task.id, orphan.worker,
           CASE WHEN task.cancel_requested_at IS NOT NULL THEN 'CANCELLED'
                WHEN task.rescues >= %s THEN 'FAILED'
                WHEN task.lock_key IS NOT NULL THEN 'BLOCKED' ELSE 'READY' END AS status
    FROM {{task}} AS task JOIN orphan ON orphan.id = task.id
    WHERE task.id = ANY (ARRAY(SELECT id FROM orphan)) AND task.attempts = orphan.attempts
      AND task.status || '' = 'RUNNING'
    FOR NO KEY UPDATE OF task SKIP LOCKED
), rescued AS (
    UPDATE {{task}} AS task
    SET status = mine.status,
        rescues = LEAST(task.rescues, 32766) + 1,
        finished_at = CASE WHEN mine.status IN ('FAILED', 'CANCELLED') THEN clock_timestamp() END,
        expires_at = CASE WHEN mine.status = 'FAILED' AND task.meta ? 'keeps_failures' THEN NULL
                          WHEN mine.status IN ('FAILED', 'CANCELLED') THEN {{expires_at}} END,
        worker = CASE WHEN mine.status IN ('FAILED', 'CANCELLED') THEN task.worker END
    FROM mine
    WHERE task.id = mine.id AND task.id = ANY (ARRAY(SELECT id FROM mine))
    RETURNING task.id, task.attempts, task.attempts - task.uncounted AS number, mine.worker, task.last_attempted_at,
              task.status, task.queue, task.task_path, task.lock_key
), recorded AS (
    INSERT INTO {{attempt}}
        (task_id, number, worker, worker_name, started_at, finished_at, outcome, exception_path, traceback)
    SELECT id, number, worker, (SELECT owner.name FROM {{worker}} AS owner WHERE owner.id = rescued.worker),
           last_attempted_at, clock_timestamp(), 'LOST', %s, %s
    FROM rescued
)
SELECT id, attempts, worker, status, queue, task_path, lock_key FROM rescued
"""

# The number of tasks of each queue that run on workers that may be dead: a worker without a row, with a missing
# heartbeat, or with a lock that no session holds.
POSSIBLY_LOST = f"""
WITH RECURSIVE {_HELD}, {_BUSY}, silent AS MATERIALIZED (
    SELECT busy.worker FROM busy WHERE busy.worker IS NOT NULL AND NOT EXISTS (
        SELECT FROM {{worker}} AS worker WHERE worker.id = busy.worker
           AND {is_recent("worker.heartbeat_at")} AND {_LOCK_IS_HELD})
)
SELECT owned.queue, count(*) FROM silent CROSS JOIN LATERAL (
    SELECT task.queue FROM {{task}} AS task
    WHERE task.status = 'RUNNING' AND task.worker BETWEEN silent.worker AND silent.worker
      AND task.backend = COALESCE(%s::text, task.backend)
    ORDER BY task.worker) AS owned
GROUP BY owned.queue
"""


@dataclass(frozen=True, slots=True)
class Rescued:
    """A claim that was taken back from a dead worker.

    ``status`` is READY or BLOCKED; FAILED after too many rescues; CANCELLED if a cancel was requested.
    """

    id: int
    attempt: int
    worker: UUID
    status: str
    queue: str
    task_path: str
    lock_key: str | None


def rescue(using: str, *, limit: int = RESCUED_AT_ONCE) -> list[Rescued]:
    """Take up to ``limit`` claims back from dead workers, and return them.

    A rescued task is READY again, or BLOCKED if it has a lock key. It has used no retry. A task whose workers died more
    often than ``MAX_RESCUES`` ends FAILED. A task whose cancel was requested ends CANCELLED.
    """
    settings = get_settings()
    text = "Its worker died or wrote no heartbeat for too long while it ran this attempt."
    silences = (*witness_values(), missing(), missing(), silent_after())
    values = (*silences, limit, limit, settings.MAX_RESCUES, LOST_WITH_WORKER, text)
    rescued = [Rescued(*row) for row in run_by_index(using, RESCUE, *values)]
    wake(using, (each.queue for each in rescued if each.status == TaskStatus.READY))
    admit_on_commit(using, {each.lock_key for each in rescued})
    release_on_commit(using, [each.id for each in rescued if each.status in FINISHED])
    return rescued


def possibly_lost(using: str, *, backend: str | None = None) -> list[tuple[str, int]]:
    """Return how many tasks of each queue run on workers that may be dead.

    Such a task is rescued soon, or its worker sends heartbeats again. ``backend``: only tasks of this alias in TASKS.
    """
    return run_by_index(using, POSSIBLY_LOST, missing(), missing(), backend)
