"""Which queues exist: queues of waiting, running and failed tasks by index, of finished tasks by the statistics.

With hundreds of queues the index probes read thousands of pages. So if a worker has counted the queues lately
(shared_counts.py), the queues are read from its counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from django_pglock.conf import get_settings
from django_pglock.store.liveness import is_recent
from django_pglock.store.ready import FIND_QUEUES
from django_pglock.store.shared_failures import MAX_AGE_FOR_PAGES
from django_pglock.store.statements import run

#: The largest number of tasks of a status that are read where no index has the queues. Further tasks may be in other
#: queues.
MOST_READ = 1000

# Successful tasks are in no index on queues, and there may be ten million of them. But ANALYZE has stored their most
# common queues. The name of the table is a subquery, because with a join PostgreSQL reads its whole catalogs.
COMMON_QUEUES = """
SELECT unnest(stats.most_common_vals::text::text[]) AS queue
FROM pg_stats AS stats WHERE stats.attname = 'queue' AND (stats.schemaname, stats.tablename) = (
    SELECT space.nspname, class.relname FROM pg_class AS class
    JOIN pg_namespace AS space ON space.oid = class.relnamespace WHERE class.oid = '{task}'::regclass)
"""

# The queues, and the age of the counts. The age is NULL if there are no counts that are young enough, or if no worker
# is alive: then no worker will count again.
COUNTED_QUEUES = f"""
WITH counted AS MATERIALIZED (
    SELECT queue, counted_at FROM {{queue_count}}
    WHERE queue <> '' AND {is_recent("counted_at")}
      AND EXISTS (SELECT FROM {{worker}} WHERE {is_recent("heartbeat_at")})
), known AS (
    SELECT queue FROM counted UNION {COMMON_QUEUES} UNION SELECT unnest(%s::text[]) EXCEPT SELECT name FROM {{queue}}
)
SELECT known.queue, (SELECT EXTRACT(EPOCH FROM clock_timestamp() - min(counted_at))::float8 FROM counted) FROM known
"""

# Queues with ready or failed tasks, by a few index probes for each queue, and the queues of the newest BLOCKED,
# SCHEDULED and RUNNING tasks. count.py says why the statuses are a range, and ready.py why the limit is a subquery.
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
UNION {COMMON_QUEUES}UNION
SELECT unnest(%s::text[])
EXCEPT
SELECT name FROM {{queue}}
"""


class KnownQueues(NamedTuple):
    """Names of queues, and how many seconds ago a worker has counted their tasks. None: the queues were read now."""

    names: list[str]
    age: float | None


def queues_without_row(using: str, *, also: Iterable[str] = ()) -> KnownQueues:
    """Return the queues that have tasks, and those of ``also``, without the queues that have a row.

    A queue has a row once it has been paused. A queue may be missing if it is newer than the counts, or if it has only
    a few tasks and all of them are finished.
    """
    names = list(also)
    counted = run(using, COUNTED_QUEUES, MAX_AGE_FOR_PAGES, get_settings().HEARTBEAT_LIMIT, names)
    if counted and counted[0][1] is not None:
        return KnownQueues(sorted(queue for queue, _ in counted), counted[0][1])
    return KnownQueues(sorted(queue for (queue,) in run(using, KNOWN_QUEUES, MOST_READ, names)), None)
