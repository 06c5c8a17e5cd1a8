"""Finds the lock keys at which tasks wait, and the tasks that hold a lock key."""

from __future__ import annotations

from django_pglock.store.statements import run

#: The largest number of keys that one statement returns.
KEYS_AT_ONCE = 1000

# The next keys at which tasks wait, behind one key, by one index probe for each key. After a crash, tasks may wait
# although their key is free.
BLOCKED_KEYS = """
WITH RECURSIVE found AS (
    (SELECT lock_key, 1 AS number FROM {task}
     WHERE lock_key > %s AND status = 'BLOCKED' AND finished_at IS NULL ORDER BY lock_key, status, id LIMIT 1)
    UNION ALL
    SELECT (SELECT task.lock_key FROM {task} AS task
            WHERE task.lock_key > found.lock_key AND task.status = 'BLOCKED' AND task.finished_at IS NULL
            ORDER BY task.lock_key, task.status, task.id LIMIT 1), number + 1
    FROM found WHERE found.lock_key IS NOT NULL AND number < %s
)
SELECT lock_key FROM found WHERE lock_key IS NOT NULL
"""

# The tasks that hold a key: admitted tasks, and tasks that will be retried. The first thousand of each status are read.
# The comment at ADMIT in admit.py says why keys are compared by ranges, and ready.py why the limit is a subquery.
HOLDERS = """
SELECT first.id FROM unnest(ARRAY['READY', 'RUNNING', 'SCHEDULED']) AS wanted (status) CROSS JOIN LATERAL (
    SELECT task.id, task.status, task.started_at FROM {task} AS task
    WHERE (task.lock_key, task.status) BETWEEN (%s, wanted.status) AND (%s, wanted.status)
      AND task.lock_key IS NOT NULL AND task.finished_at IS NULL
    ORDER BY task.lock_key, task.status, task.id LIMIT (SELECT 1000)) AS first
WHERE first.status <> 'SCHEDULED' OR first.started_at IS NOT NULL
ORDER BY first.id LIMIT %s
"""


def blocked_keys(using: str, after: str, *, limit: int = KEYS_AT_ONCE) -> list[str]:
    """Return, in order, up to ``limit`` keys behind ``after`` at which tasks wait."""
    return [key for (key,) in run(using, BLOCKED_KEYS, after, limit)]


def holders(using: str, key: str, *, limit: int) -> list[int]:
    """Return the ids of up to ``limit`` tasks that hold ``key``, the oldest first."""
    return [id_ for (id_,) in run(using, HOLDERS, key, key, limit)]
