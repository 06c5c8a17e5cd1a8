"""Retrying a whole group of failures at a rate, as a task with progress that can be cancelled.

Between two batches the task snoozes. So it occupies no thread of a worker, which may be needed by the tasks that it
retries, and a worker that stops does not wait for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from django_pglock.bulk import PRIORITY, backend_of
from django_pglock.errors import DuplicateTask
from django_pglock.store.redrive import HIGHEST_RATE, LOWEST_RATE, redrive
from django_pglock.store.statements import rows_of
from django_pglock.store.unique import HAS_UNIQUE_KEY
from django_pglock.tasks.compat import task_backends
from django_pglock.tasks.definition import task
from django_pglock.tasks.options import Unique
from django_pglock.tasks.queues import OWN_QUEUE
from django_pglock.tasks.retry import Snooze


@task(
    takes_context=True,
    queue_name=OWN_QUEUE,
    priority=PRIORITY,
    unique=Unique("{fingerprint}", while_="unfinished", on_conflict="raise"),
    # The statements may fail while a server restarts.
    max_attempts=10,
)
def redrive_tasks(context: Any, fingerprint: int, rate: float) -> int:
    """Retry the failed tasks of a group, at most ``rate`` a second. Returns how many were retried."""
    context.check()
    began, result = time.monotonic(), context.task_result
    backend: Any = task_backends[result.backend]
    limit = max(1, math.floor(rate))
    redriven = redrive(
        backend.database,
        fingerprint,
        before=result.enqueued_at,
        limit=limit,
        by=int(result.id),
        attempt=context.fencing_token,
        seconds=limit / rate,
    )
    if redriven.is_over:
        return redriven.done
    raise Snooze(max(0.0, redriven.wait - (time.monotonic() - began)))


def enqueue_redrive(using: str, fingerprint: int, rate: float) -> tuple[int, bool]:
    """Enqueue the task that retries a group of failures, at most ``rate`` tasks a second.

    Returns its id, and whether it is new: a group has one redrive at a time. Raises ``ValueError`` for a rate that is
    too low or too high, and ``ConfigurationError`` if no backend stores its tasks in the database ``using``.
    """
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise ValueError(f"The rate is {rate:g} tasks a second; use {LOWEST_RATE:g} to {HIGHEST_RATE:g}.")
    work = redrive_tasks.using(backend=backend_of(using))
    try:
        return int(work.enqueue(fingerprint, rate).id), True
    except DuplicateTask as there:
        return int(there.result_id), False


def redrives(using: str, fingerprints: Iterable[int]) -> dict[int, Any]:
    """Return the unfinished redrives of these groups, by fingerprint: their tasks with id, status and progress."""
    keys = {f"{redrive_tasks.module_path} {each}": each for each in fingerprints}
    # In these words and without an order, the planner can use no other index than that of unique keys.
    rows = rows_of("Task", using).filter(HAS_UNIQUE_KEY, unique_key__in=list(keys)).order_by()
    return {keys[row.unique_key]: row for row in rows.only("id", "status", "progress", "unique_key")}
