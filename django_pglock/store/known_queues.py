"""Which queues exist: those of waiting, running and failed tasks by index, of finished ones by statistics."""

from __future__ import annotations

from collections.abc import Iterable

from django_pglock.store.ready import FIND_QUEUES
from django_pglock.store.sql import run

#: Tasks of a status that are read where no index has the queues. Others may be in further queues.
MOST_READ = 1000

# Queues with ready or failed tasks, by a few index probes each. BLOCKED, SCHEDULED and RUNNING ones: of the newest.
# Tasks that have succeeded are in no index on queues, and may be ten million: ANALYZE has noted their most common
# queues. count.py says why a range of statuses, and ready.py why the limit is a subquery.
KNOWN_QUEUES = f"""{FIND_QUEUES}, failed AS (
    (SELECT queue FROM {{task}} WHERE status = 'FAILED' ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT queue FROM {{task}} WHERE status = 'FAILED' AND queue > failed.queue ORDER BY queue LIMIT 1)
    FROM failed WHERE failed.queue IS NOT NULL
)
SELECT queue FROM found WHERE queue IS NOT NULL
UNION
SELECT queue FROM failed WHERE queue IS NOT NULL
UNION
SELECT newest.queue FROM unnest(ARRAY['BLOCKED', 'SCHEDULED', 'RUNNING']) AS wanted (status) CROSS JOIN LATERAL (
    SELECT task.queue FROM {{task}} AS task
    WHERE task.status BETWEEN wanted.status AND wanted.status AND task.status <> 'SUCCESSFUL'
    ORDER BY task.status DESC, task.id DESC LIMIT (SELECT %s::bigint)) AS newest
UNION
SELECT unnest(stats.most_common_vals::text::text[])
FROM pg_stats AS stats JOIN pg_class AS class ON class.relname = stats.tablename
WHERE class.oid = '{{task}}'::regclass AND class.relnamespace = stats.schemaname::regnamespace
  AND stats.attname = 'queue'
UNION
SELECT unnest(%s::text[])
EXCEPT
SELECT name FROM {{queue}}
"""


def queues_without_row(using: str, *, also: Iterable[str] = ()) -> list[str]:
    """Return the names of the queues that have tasks, and those of ``also``, but not those that have been paused once.

    A queue whose tasks are all finished, and few, may be missing.
    """
    return sorted(queue for (queue,) in run(using, KNOWN_QUEUES, MOST_READ, list(also)))
