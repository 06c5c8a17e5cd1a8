"""Ready tasks: the queryset, the queues that have ready tasks, and the functions that these tasks call."""

from __future__ import annotations

from typing import Any

from django.db import connections

from django_pglock.store.plans import prepared
from django_pglock.store.statements import filled, run
from django_pglock.tasks.states import TaskStatus

#: The number of tasks of each queue whose functions are read.
MOST_READ = 1000

# The distinct queues that have ready tasks, by two index probes each. A DISTINCT would read every ready row.
FIND_QUEUES = """
WITH RECURSIVE found AS (
    SELECT min(queue) AS queue FROM (
        (SELECT queue FROM {task} WHERE status = 'READY' AND fair_key IS NULL ORDER BY queue LIMIT 1)
        UNION ALL
        (SELECT queue FROM {task} WHERE status = 'READY' AND fair_key IS NOT NULL ORDER BY queue LIMIT 1)) AS first
    UNION ALL
    SELECT (SELECT min(queue) FROM (
        (SELECT queue FROM {task}
         WHERE status = 'READY' AND fair_key IS NULL AND queue > found.queue ORDER BY queue LIMIT 1)
        UNION ALL
        (SELECT queue FROM {task}
         WHERE status = 'READY' AND fair_key IS NOT NULL AND queue > found.queue ORDER BY queue LIMIT 1)) AS next)
    FROM found WHERE found.queue IS NOT NULL
)
"""
READY_QUEUES = f"{FIND_QUEUES}SELECT queue FROM found WHERE queue IS NOT NULL"

# The first ready tasks of each queue. Tasks that no worker claims become the first ones in time, so it is enough to
# read these. The limits are subqueries. If a limit is a literal that is larger than the length of an average queue, the
# planner reads and sorts all tasks of a queue that is much longer than average.
FIRST_READY = """found CROSS JOIN LATERAL (
    (SELECT task.task_path, task.backend, task.enqueued_at FROM {task} AS task
     WHERE task.status = 'READY' AND task.fair_key IS NULL AND task.queue = found.queue
     ORDER BY task.priority DESC, task.id LIMIT (SELECT %s::bigint))
    UNION ALL
    (SELECT task.task_path, task.backend, task.enqueued_at FROM {task} AS task
     WHERE task.status = 'READY' AND task.fair_key IS NOT NULL AND task.queue = found.queue
     ORDER BY task.fair_key, task.priority DESC, task.id LIMIT (SELECT %s::bigint))) AS first"""

# The functions that ready tasks call.
READY_PATHS = f"{FIND_QUEUES}SELECT DISTINCT found.queue, first.task_path FROM {FIRST_READY}"


def ready(tasks: Any) -> Any:
    """Return the tasks that can be claimed now, in the order in which they run: by priority, then as enqueued."""
    return tasks.filter(status=TaskStatus.READY).order_by("-priority", "id")


def ready_queues(using: str) -> list[str]:
    """Return the names of the queues that have ready tasks."""
    with connections[using].cursor() as cursor:
        statement = filled(READY_QUEUES)
        cursor.execute(prepared(cursor, statement) or statement)
        return [queue for (queue,) in cursor.fetchall()]


def ready_paths(using: str) -> list[tuple[str, str]]:
    """Return the functions that the first ready tasks of each queue call, as (queue, path)."""
    return run(using, READY_PATHS, MOST_READ, MOST_READ)
