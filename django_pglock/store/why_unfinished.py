"""Why a task has not finished, for the message of a wait whose time is over."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress

from django.db import DatabaseError

from django_pglock.conf import get_settings
from django_pglock.store.sql import run
from django_pglock.tasks.queues import is_served
from django_pglock.tasks.states import TaskStatus

# The task, whether its queue is paused, how many workers are alive, and the queues of those that know its function.
WHY_UNFINISHED = """
SELECT task.status, task.queue, task.task_path, queue.paused_at IS NOT NULL, alive.workers, alive.served
FROM {task} AS task LEFT JOIN {queue} AS queue ON queue.name = task.queue CROSS JOIN LATERAL (
    SELECT count(*) AS workers,
           jsonb_agg(worker.queues) FILTER (WHERE worker.task_paths @> to_jsonb(task.task_path)) AS served
    FROM {worker} AS worker WHERE worker.heartbeat_at > clock_timestamp() - make_interval(secs => %s)) AS alive
WHERE task.id = %s
"""


def why_unfinished(using: str, task_id: int) -> str:
    """Return the status of a task and what keeps it from a worker, as ``"it is READY in the queue 'mail'"``.

    Returns an empty string if there is no such task, or if the database does not answer.
    """
    alive = get_settings().HEARTBEAT_LIMIT
    with suppress(DatabaseError):
        for status, queue, path, is_paused, workers, served in run(using, WHY_UNFINISHED, alive, task_id):
            reason = "" if status == TaskStatus.RUNNING else _obstacle(queue, is_paused, path, workers, served)
            return f"it is {status} in the queue {queue!r}{reason}"
    return ""


def _obstacle(queue: str, is_paused: bool, path: str, workers: int, served: str | None) -> str:
    if not workers:
        return ", and no worker is alive. Start one: manage.py runlockworker"
    if is_paused:
        return f", and this queue is paused. Resume it: manage.py locktasks resume {shlex.quote(queue)}"
    if served is None:
        return f", and no living worker has imported {path}. Restart the workers with the code that defines it"
    if not any(is_served(queue, asked) for asked in json.loads(served)):
        return f", and no living worker serves this queue. Start one: manage.py runlockworker {shlex.quote(queue)}"
    return ""
