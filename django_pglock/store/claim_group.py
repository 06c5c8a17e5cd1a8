"""A worker that has claimed a task with ``group=`` claims the other tasks of the group, to run all in one call."""

from __future__ import annotations

from operator import attrgetter

from django_pglock.store.statements import run_by_index
from django_pglock.tasks.call_keys import GROUPED
from django_pglock.tasks.claim import Claim

# Without ``lock=``: claims the other tasks of the group, backend and queue of a claimed task: those that wait for the
# group's key, and those that are SCHEDULED only because of ``gather``. Other queues may be paused, or not served by the
# worker. All tasks have the same key. So no other worker can claim them at the same time, unless this worker was frozen
# and has lost its claim. Then ``first`` has no row, and no task is claimed. The comment at ADMIT in admit.py says why
# keys are compared by ranges.
CLAIM_GROUP = """
WITH first AS MATERIALIZED (
    SELECT id, backend, queue FROM {task}
    WHERE id = %s AND attempts = %s AND status || '' = 'RUNNING' FOR NO KEY UPDATE
), waiting AS MATERIALIZED (
    SELECT task.id FROM {task} AS task
    WHERE (task.lock_key, task.status) BETWEEN (%s, 'BLOCKED') AND (%s, 'BLOCKED')
      AND task.lock_key IS NOT NULL AND task.finished_at IS NULL AND task.waits_for = 0 AND task.task_path = %s
      AND (task.backend, task.queue) = (SELECT backend, queue FROM first)
    ORDER BY task.lock_key, task.status, task.id LIMIT %s FOR NO KEY UPDATE OF task SKIP LOCKED
), gathering AS MATERIALIZED (
    SELECT task.id FROM {task} AS task
    WHERE (task.lock_key, task.status) BETWEEN (%s, 'SCHEDULED') AND (%s, 'SCHEDULED')
      AND task.lock_key IS NOT NULL AND task.finished_at IS NULL AND task.waits_for = 0 AND task.task_path = %s
      AND (task.backend, task.queue) = (SELECT backend, queue FROM first)
      AND task.started_at IS NULL AND task.run_after <= clock_timestamp() + make_interval(secs => %s)
    ORDER BY task.lock_key, task.status, task.id LIMIT %s FOR NO KEY UPDATE OF task SKIP LOCKED
), others AS MATERIALIZED (
    SELECT id FROM (SELECT id FROM waiting UNION ALL SELECT id FROM gathering) AS either ORDER BY id LIMIT %s
)
UPDATE {task} AS task
SET status = 'RUNNING', attempts = {next_attempt}, worker = %s,
    started_at = COALESCE(started_at, statement_timestamp()), last_attempted_at = statement_timestamp()
WHERE task.id = ANY (ARRAY(SELECT id FROM others))
RETURNING {claim_columns}
"""

# With ``lock=``: claims the tasks of the same group, backend and queue that are next in the order of the lock key. A
# task is not claimed if an older task at this key belongs to another group or queue, waits for other tasks
# (``after=``), or has a locked row. Tasks that are SCHEDULED only because of ``gather`` have no place at the key yet.
# They are claimed if all older tasks at the key are claimed.
CLAIM_GROUP_IN_KEY_ORDER = """
WITH first AS MATERIALIZED (
    SELECT id, task_path, backend, queue, group_key FROM {task}
    WHERE id = %s AND attempts = %s AND status || '' = 'RUNNING' FOR NO KEY UPDATE
), behind AS MATERIALIZED (
    (SELECT task.id, COALESCE((task.task_path, task.backend, task.queue, task.group_key, task.waits_for)
                              = (SELECT task_path, backend, queue, group_key, 0 FROM first), false) AS is_alike
     FROM {task} AS task
     WHERE (task.lock_key, task.status) BETWEEN (%s, 'BLOCKED') AND (%s, 'BLOCKED')
       AND task.lock_key IS NOT NULL AND task.finished_at IS NULL
     ORDER BY task.lock_key, task.status, task.id LIMIT %s)
    UNION ALL
    (SELECT task.id, true FROM {task} AS task
     WHERE (task.lock_key, task.status) BETWEEN (%s, 'SCHEDULED') AND (%s, 'SCHEDULED')
       AND task.lock_key IS NOT NULL AND task.finished_at IS NULL AND task.waits_for = 0
       AND (task.task_path, task.backend, task.queue, task.group_key)
           = (SELECT task_path, backend, queue, group_key FROM first)
       AND task.started_at IS NULL AND task.run_after <= clock_timestamp() + make_interval(secs => %s)
     ORDER BY task.lock_key, task.status, task.id LIMIT %s)
), locked AS MATERIALIZED (
    SELECT task.id FROM {task} AS task
    WHERE task.id = ANY (ARRAY(SELECT id FROM behind WHERE is_alike)) AND task.status || '' IN ('BLOCKED', 'SCHEDULED')
    FOR NO KEY UPDATE SKIP LOCKED
), others AS MATERIALIZED (
    SELECT id FROM (
        SELECT id, bool_and(is_alike AND id IN (SELECT id FROM locked)) OVER (ORDER BY id) AS is_next FROM behind
    ) AS each
    WHERE is_next ORDER BY id LIMIT %s
)
UPDATE {task} AS task
SET status = 'RUNNING', attempts = {next_attempt}, worker = %s,
    started_at = COALESCE(started_at, statement_timestamp()), last_attempted_at = statement_timestamp()
WHERE task.id = ANY (ARRAY(SELECT id FROM others))
RETURNING {claim_columns}
"""


def claim_group(using: str, first: Claim, *, limit: int, gather: float) -> list[Claim]:
    """Claim up to ``limit`` tasks that wait in the group of the claimed task ``first``, for the same worker.

    ``gather`` is the time in seconds for which tasks of the group are held back.
    """
    key = (first.lock_key, first.lock_key)
    found: tuple[object, ...]
    if first.lock_key is not None and first.lock_key.startswith(GROUPED):
        group = (*key, first.task_path)
        statement, found = CLAIM_GROUP, (*group, limit, *group, gather, limit, limit)
    else:
        statement, found = CLAIM_GROUP_IN_KEY_ORDER, (*key, limit, *key, gather, limit, limit)
    values = (first.id, first.attempt, *found, first.worker)
    rows = run_by_index(using, statement, *values)
    return sorted(
        (Claim(id_, attempt, first.worker, *columns) for id_, attempt, *columns in rows), key=attrgetter("id")
    )
