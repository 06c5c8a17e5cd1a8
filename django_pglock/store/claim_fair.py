"""A worker claims tasks with ``fair=``: round-robin over the keys, so a million tasks of one key delay no other key."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from django_pglock.store.statements import run
from django_pglock.tasks.claim import Claim

# Claims one task of each key, beginning behind the last key that was served. Then it claims a second task of each key,
# and so on, up to the limit. It goes from key to key by index probes. So its cost depends neither on the number of keys
# nor on the number of tasks. A key is skipped if this worker knows no function of the tasks that wait there. One claim
# reads at most a thousand keys. Each row also has the key behind which the next claim continues. It is empty if the
# last key was read. If nothing was claimed, there is one row without a claim.
CLAIM_FAIR = """
WITH RECURSIVE keys AS (
    SELECT %s::text AS fair_key, 0 AS number, 0 AS found, false AS is_known
    WHERE NOT EXISTS (SELECT FROM {queue} WHERE name = %s AND paused_at IS NOT NULL)
    UNION ALL
    SELECT next.fair_key, number + 1, found + next.is_known::int, next.is_known
    FROM keys CROSS JOIN LATERAL (
        SELECT first.fair_key, (
            SELECT task.id FROM {task} AS task
            WHERE task.status = 'READY' AND task.fair_key IS NOT NULL AND task.queue = %s
              AND task.fair_key = first.fair_key AND task.task_path = ANY (%s::text[])
              AND task.backend = COALESCE(%s::text, task.backend)
            ORDER BY task.priority DESC, task.id LIMIT 1) IS NOT NULL AS is_known
        FROM (SELECT task.fair_key::text FROM {task} AS task
              WHERE task.status = 'READY' AND task.fair_key IS NOT NULL AND task.queue = %s
                AND task.fair_key > keys.fair_key ORDER BY task.fair_key LIMIT 1) AS first
    ) AS next
    WHERE number < 1000 AND found < %s
), chosen AS MATERIALIZED (
    SELECT next.id, row_number() OVER (ORDER BY next.rank, keys.fair_key) AS place
    FROM keys CROSS JOIN LATERAL (
        SELECT locked.id, row_number() OVER () AS rank FROM (
            SELECT task.id FROM {task} AS task
            WHERE task.status = 'READY' AND task.fair_key IS NOT NULL AND task.queue = %s
              AND task.fair_key = keys.fair_key AND task.task_path = ANY (%s::text[])
              AND task.backend = COALESCE(%s::text, task.backend)
            ORDER BY task.priority DESC, task.id
            LIMIT ceil(%s::numeric / (SELECT max(found) FROM keys))
            FOR NO KEY UPDATE OF task SKIP LOCKED) AS locked
    ) AS next
    WHERE keys.is_known
    ORDER BY next.rank, keys.fair_key LIMIT %s
), claimed AS (
    UPDATE {task} AS task
    SET status = 'RUNNING', attempts = {next_attempt}, worker = %s,
        started_at = COALESCE(started_at, statement_timestamp()), last_attempted_at = statement_timestamp()
    FROM chosen WHERE task.id = chosen.id AND task.id = ANY (ARRAY(SELECT id FROM chosen))
    RETURNING chosen.place, {claim_columns}
)
SELECT walk.ended_at, claimed.*
FROM (SELECT CASE WHEN max(number) = 1000 OR max(found) = %s THEN max(fair_key) ELSE '' END AS ended_at
      FROM keys) AS walk
LEFT JOIN claimed ON true
ORDER BY claimed.place
"""


def claim_fair(
    using: str, *, worker: UUID, queue: str, paths: Sequence[str], after: str, limit: int, backend: str | None = None
) -> tuple[list[Claim], str]:
    """Claim tasks with ``fair=``, round-robin over their keys, beginning behind the key ``after``.

    Returns the claims in the order in which they run, and the key behind which to continue. It is empty if there is no
    further key. Otherwise there may be more tasks, even if no claim is returned: one call reads a limited number of
    keys.
    """
    here = (queue, list(paths), backend)
    walk = (after, queue, *here, queue, limit)
    rows = run(using, CLAIM_FAIR, *walk, *here, limit, limit, worker, limit)
    claims = [Claim(id_, attempt, worker, *columns) for _, place, id_, attempt, *columns in rows if place is not None]
    return claims, rows[0][0]
