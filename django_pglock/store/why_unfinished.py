"""Why no worker runs a task, as values. The message of a timeout and the admin turn them into sentences."""

from __future__ import annotations

import json
from datetime import datetime
from enum import Enum, auto
from typing import NamedTuple

from django_pglock.conf import get_settings
from django_pglock.store.liveness import is_recent
from django_pglock.store.statements import run
from django_pglock.tasks.queues import is_served
from django_pglock.tasks.states import TaskStatus

# The task, whether its queue is paused, the number of living workers, and the queues of those that know its function.
WHY_UNFINISHED = f"""
SELECT task.status, task.queue, task.task_path, task.run_after, queue.paused_at IS NOT NULL, alive.workers, alive.served
FROM {{task}} AS task LEFT JOIN {{queue}} AS queue ON queue.name = task.queue CROSS JOIN LATERAL (
    SELECT count(*) AS workers,
           jsonb_agg(worker.queues) FILTER (WHERE worker.task_paths @> to_jsonb(task.task_path)) AS served
    FROM {{worker}} AS worker WHERE {is_recent("worker.heartbeat_at")}) AS alive
WHERE task.id = %s
"""


class Obstacle(Enum):
    """The reason why no worker runs a task. Of several reasons, the first in this order is returned."""

    NO_WORKER = auto()
    PAUSED = auto()
    #: No living worker has imported the function.
    UNKNOWN = auto()
    #: No living worker that has imported the function serves the queue.
    UNSERVED = auto()


class Unfinished(NamedTuple):
    """The present state of a task, and the reason why no worker runs it. None: a worker runs it, or can run it."""

    status: str
    queue: str
    task_path: str
    #: When a scheduled task is due.
    due: datetime | None
    obstacle: Obstacle | None


def why_unfinished(using: str, task_id: int) -> Unfinished | None:
    """Return why no worker runs a task; None if there is no such task. Sends one statement."""
    alive = get_settings().HEARTBEAT_LIMIT
    for status, queue, path, run_after, is_paused, workers, served in run(using, WHY_UNFINISHED, alive, task_id):
        due = run_after if status == TaskStatus.SCHEDULED else None
        obstacle = None if status == TaskStatus.RUNNING else _obstacle(queue, is_paused, workers, served)
        return Unfinished(status, queue, path, due, obstacle)
    return None


def _obstacle(queue: str, is_paused: bool, workers: int, served: str | None) -> Obstacle | None:
    if not workers:
        return Obstacle.NO_WORKER
    if is_paused:
        return Obstacle.PAUSED
    if served is None:
        return Obstacle.UNKNOWN
    return None if any(is_served(queue, asked) for asked in json.loads(served)) else Obstacle.UNSERVED
