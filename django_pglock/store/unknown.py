"""Finds ready tasks that no living worker runs: because none knows their functions, or none serves their queues."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from django_pglock.conf import get_settings
from django_pglock.store.liveness import alive, is_recent
from django_pglock.store.pause import paused_queues
from django_pglock.store.ready import FIND_QUEUES, FIRST_READY, ready_queues
from django_pglock.store.statements import rows_of, run
from django_pglock.tasks.queues import is_served

# Ready tasks whose function no living worker knows, or one worker does not know.
UNKNOWN = f"""
{FIND_QUEUES.rstrip()}, known AS MATERIALIZED (
    SELECT jsonb_array_elements_text(worker.task_paths) AS path FROM {{worker}} AS worker
    WHERE {is_recent("worker.heartbeat_at")}
      AND worker.id = COALESCE(%s::uuid, worker.id)
)
SELECT first.task_path, found.queue, count(*), min(first.enqueued_at) AS oldest
FROM {FIRST_READY}
WHERE first.task_path NOT IN (SELECT path FROM known)
  AND first.backend = COALESCE(%s::text, first.backend)
GROUP BY first.task_path, found.queue
ORDER BY oldest, first.task_path
"""


class UnknownTasks(NamedTuple):
    """Ready tasks of one function and queue that no living worker knows: how many were read, and since when."""

    task_path: str
    queue: str
    waiting: int
    oldest: datetime


def unknown(
    using: str, *, limit: int = 1000, worker: UUID | None = None, backend: str | None = None
) -> list[UnknownTasks]:
    """Return the ready tasks whose function no living worker knows, the longest waiting first.

    - ``limit``: the first tasks of each queue are read, up to this number, by index.
    - ``worker``: return the tasks whose function this worker does not know, even if other workers know it.
    - ``backend``: only tasks of this alias in TASKS.

    It does not check whether a worker that knows a function also serves the queue.
    """
    limit_of_heartbeats = get_settings().HEARTBEAT_LIMIT
    return [UnknownTasks(*row) for row in run(using, UNKNOWN, limit_of_heartbeats, worker, limit, limit, backend)]


def unserved_queues(using: str) -> list[str]:
    """Return the queues that have ready tasks, are not paused, and that no living worker serves."""
    asked = list(alive(rows_of("Worker", using)).values_list("queues", flat=True))
    waiting = set(ready_queues(using)) - paused_queues(using).keys()
    return sorted(name for name in waiting if not any(is_served(name, each) for each in asked))
