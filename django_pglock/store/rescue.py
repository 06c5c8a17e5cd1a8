"""Rescue: takes claims back from dead workers, and counts the tasks that kill their worker or their session.

One rule for both. Each death counts as a rescue. After ``MAX_RESCUES`` the task runs alone (``feeder.py``), and
after one more death it is FAILED. An outage must not count, so a lost session counts only if the server itself shows
that there was none: see ``ServerTimes``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple
from uuid import UUID

from django.db import ProgrammingError

from django_pglock.conf import get_settings
from django_pglock.postgres.connections import pause_after, transaction_block
from django_pglock.store.admit import admit_on_commit
from django_pglock.store.enqueue import enqueue_handlers
from django_pglock.store.liveness import HELD_LOCKS, is_recent, missing, silent_after
from django_pglock.store.outcome import Failed, Failure, Interrupted
from django_pglock.store.release import release_on_commit
from django_pglock.store.statements import IN_INDEX_ORDER, run
from django_pglock.store.wake import wake
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.states import FINISHED, TaskStatus

#: The number of rows that one statement selects by an array and joins. The planner may compare each pair.
RESCUED_AT_ONCE = 200
# The same number as ``fingerprint_of`` without a place.
_FINGERPRINT = r"""(('x' || encode(substring(sha256(convert_to(
            task.task_path || E'\n' || %s || E'\n', 'UTF8')) FOR 8), 'hex'))::bit(64) >> 1)::bigint"""
LOST_WITH_WORKER = "django_pglock.errors.WorkerLost"
#: Seconds before a task that was interrupted runs again. Doubled each time, up to the second number. So a pause is not
#: much longer than the time for which the cause has lasted.
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 120.0
TOO_OFTEN = (
    "The task was cut off {number} times, the last time while no other task ran in its process, and there was no "
    "outage. So it does not run again. See MAX_RESCUES."
)

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
# holds its lock, and no session does. A caller whose own heartbeats were interrupted lately is no witness of the second
# or the third case (liveness.py). Tasks of living workers are not read.
#
# The claims are selected on one snapshot, by id and attempt. If a task has been settled and claimed by another worker
# since then, its row has another attempt number, and it is not rescued. SKIP LOCKED, because a row that is being
# settled at this moment needs no rescue. A task whose cancel was requested does not run again.
RESCUE = f"""
WITH RECURSIVE {_HELD}, alive AS MATERIALIZED (
    SELECT worker.id FROM {{worker}} AS worker
    WHERE {is_recent("worker.heartbeat_at")}
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
        worker = CASE WHEN mine.status IN ('FAILED', 'CANCELLED') THEN task.worker END,
        fingerprint = CASE WHEN mine.status = 'FAILED' THEN {_FINGERPRINT} END
    FROM mine
    WHERE task.id = mine.id AND task.id = ANY (ARRAY(SELECT id FROM mine))
    RETURNING task.id, task.attempts, task.attempts - task.uncounted AS number, mine.worker, task.last_attempted_at,
              task.status, task.queue, task.task_path, task.lock_key, task.meta ->> 'on_failure' AS on_failure
), recorded AS (
    INSERT INTO {{attempt}}
        (task_id, number, worker, worker_name, started_at, finished_at, outcome, exception_path, traceback)
    SELECT id, number, worker, (SELECT owner.name FROM {{worker}} AS owner WHERE owner.id = rescued.worker),
           last_attempted_at, clock_timestamp(), 'LOST', %s, %s
    FROM rescued
)
SELECT id, attempts, worker, status, queue, task_path, lock_key, on_failure FROM rescued
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


# When this session and the server began to work, and when the server has last recovered from the crash of a session.
# The statistics are discarded then. A role may not see the start of a session that it has not opened: NULL.
SERVER_TIMES = """
SELECT date_part('epoch', (SELECT backend_start FROM pg_stat_get_activity(pg_backend_pid()))),
       date_part('epoch', pg_postmaster_start_time()), date_part('epoch', (SELECT stats_reset FROM pg_stat_bgwriter))
"""


class ServerTimes(NamedTuple):
    """When a session and its server began, in seconds since the epoch by the server's clock."""

    session: float | None
    server: float
    recovery: float | None

    def show_no_outage(self, since: float) -> bool:
        """Return whether the loss of a session since this moment was not an outage.

        Either this other session was not lost. Or all sessions were, by the crash of one of them: the server has
        recovered, but was not started again.
        """
        if self.session is not None and self.session < since:
            return True
        return self.recovery is not None and self.server < since < self.recovery


def server_times(using: str) -> ServerTimes:
    """Ask the server, in this thread's session."""
    try:
        return ServerTimes(*run(using, SERVER_TIMES)[0])
    except ProgrammingError:
        # The role may not ask, so everything counts as an outage.
        return ServerTimes(session=None, server=math.inf, recovery=None)


def interrupted(claim: Claim, error: BaseException, *, is_suspect: bool = False) -> Interrupted:
    """Return the outcome of an attempt that was cut off. The pauses before the next attempts double, with jitter."""
    before = max(0, claim.number - 1 - claim.retries)
    return Interrupted(Failure.of(error), pause_after(before + 1, FIRST_PAUSE, LONGEST_PAUSE), is_suspect)


def judge(claim: Claim, outcome: Interrupted, times: ServerTimes) -> Interrupted | Failed:
    """Return the verdict on a suspect: it counts as rescued, it has failed, or it was an outage, which never counts."""
    if not times.show_no_outage(float(claim.last_attempted_at)):
        return replace(outcome, is_suspect=False)
    if claim.rescues >= get_settings().MAX_RESCUES:
        return Failed(outcome.failure.with_reason(TOO_OFTEN.format(number=claim.rescues + 1)))
    return replace(outcome, is_suspect=False, rescued=1)


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
    on_failure: str | None


def rescue(using: str, *, unbroken: float, limit: int = RESCUED_AT_ONCE) -> list[Rescued]:
    """Take up to ``limit`` claims back from dead workers, and return them.

    ``unbroken``: for how many seconds the heartbeats of the caller have come without interruption. It does not count
    another worker as dead that it has missed for longer.

    A rescued task is READY again, or BLOCKED if it has a lock key. It has used no retry. A task whose workers died more
    often than ``MAX_RESCUES`` ends FAILED, and the function of its ``on_failure=`` is enqueued. A task whose cancel was
    requested ends CANCELLED.
    """
    settings = get_settings()
    text = "Its worker died or wrote no heartbeat for too long while it ran this attempt."
    silences = (
        missing(),
        missing() if unbroken >= missing() else math.inf,
        silent_after() if unbroken >= silent_after() else math.inf,
    )
    values = (*silences, limit, limit, settings.MAX_RESCUES, *(LOST_WITH_WORKER, LOST_WITH_WORKER, text))
    with transaction_block(using):
        rescued = [Rescued(*row) for row in run(using, RESCUE, *values, first=IN_INDEX_ORDER)]
        failed = [each for each in rescued if each.status == TaskStatus.FAILED]
        enqueue_handlers(using, [(each.id, each.on_failure) for each in failed if each.on_failure])
    wake(using, (each.queue for each in rescued if each.status == TaskStatus.READY))
    admit_on_commit(using, {each.lock_key for each in rescued})
    release_on_commit(using, [each.id for each in rescued if each.status in FINISHED])
    return rescued


def possibly_lost(using: str, *, backend: str | None = None) -> list[tuple[str, int]]:
    """Return how many tasks of each queue run on workers that may be dead.

    Such a task is rescued soon, or its worker sends heartbeats again. ``backend``: only tasks of this alias in TASKS.
    """
    return run(using, POSSIBLY_LOST, missing(), missing(), backend, first=IN_INDEX_ORDER)
