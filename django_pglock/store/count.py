"""What is in the queues, counted only up to a limit: nobody waits for ten million rows to learn that they are many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django_pglock.store.pause import paused_queues
from django_pglock.store.promote import due
from django_pglock.store.ready import ready_queues
from django_pglock.store.sql import rows_of, run
from django_pglock.tasks.states import TaskStatus

#: Tasks of one status that are counted at most.
MOST_COUNTED = 10_000
#: Tasks that are read at most where no index helps.
MOST_SEARCHED = 100_000
#: The statuses that are counted. ``COUNT_OTHERS`` names them again.
COUNTED = ("READY", "BLOCKED", "SCHEDULED", "RUNNING", "FAILED")

# How many tasks of each queue are ready, and for how many seconds the oldest of them has been. Only so many rows of a
# queue are read, in the order of the two indexes of ready tasks. ready.py says why the limits are subqueries.
COUNT_READY = """
SELECT name.queue, count(*), EXTRACT(EPOCH FROM clock_timestamp() - min(ready.since))::float8
FROM unnest(%s::text[]) AS name (queue) CROSS JOIN LATERAL (
    (SELECT GREATEST(task.enqueued_at, task.run_after) AS since FROM {task} AS task
     WHERE task.status = 'READY' AND task.fair_key IS NULL AND task.queue = name.queue
     ORDER BY task.queue, task.priority DESC, task.id LIMIT (SELECT %s::bigint))
    UNION ALL
    (SELECT GREATEST(task.enqueued_at, task.run_after) FROM {task} AS task
     WHERE task.status = 'READY' AND task.fair_key IS NOT NULL AND task.queue = name.queue
     ORDER BY task.queue, task.fair_key, task.priority DESC, task.id LIMIT (SELECT %s::bigint))) AS ready
GROUP BY name.queue
"""

# The newest tasks of each other status that a person may have to look at, by queue; no index knows their queues. The
# statuses are a range, read in the order of the index. With "=" the planner may walk the primary key instead, past all
# tasks that have succeeded, in the expectation of finding these soon.
COUNT_OTHERS = """
SELECT newest.status, newest.queue, count(*)
FROM unnest(ARRAY['BLOCKED', 'SCHEDULED', 'RUNNING', 'FAILED']) AS wanted (status) CROSS JOIN LATERAL (
    SELECT task.status, task.queue FROM {task} AS task
    WHERE task.status BETWEEN wanted.status AND wanted.status AND task.status <> 'SUCCESSFUL'
    ORDER BY task.status DESC, task.id DESC LIMIT (SELECT %s::bigint)) AS newest
GROUP BY newest.status, newest.queue
"""


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """One queue: its tasks by status, the seconds for which the oldest has been ready, and since when it is paused.

    Of the statuses in ``at_least`` there may be more tasks than counted; the oldest ready one may then be older, too.
    """

    queue: str
    counts: Mapping[str, int]
    oldest_ready: float | None
    paused_at: datetime | None
    at_least: frozenset[str]


def ready_counts(using: str, *, most: int = MOST_COUNTED) -> dict[str, tuple[int, float | None]]:
    """Return for each queue that has ready tasks how many, and the age of the oldest in seconds.

    At most ``most`` tasks of a queue are counted.
    """
    return _count_ready(using, ready_queues(using), most)


def queue_counts(using: str, *, most: int = MOST_COUNTED) -> list[QueueCounts]:
    """Return what is in each queue that has unfinished or failed tasks, or is paused, by name.

    At most ``most`` tasks are counted: of the ready ones, in each queue; of each other status, in all.
    """
    ready = ready_counts(using, most=most)
    others, capped = _count_others(using, most)
    paused = paused_queues(using)
    found = []
    for queue in sorted({*ready, *others, *paused}):
        count, oldest = ready.get(queue, (0, None))
        counts = {**dict.fromkeys(COUNTED, 0), **others.get(queue, {}), "READY": count}
        at_least = capped | {"READY"} if count >= most else capped
        found.append(QueueCounts(queue, counts, oldest, paused.get(queue), frozenset(at_least)))
    return found


def count_workable(using: str, queues: Collection[str] = (), *, most: int = MOST_COUNTED) -> int:
    """Return how many tasks of these queues (none: of all) a worker could start now: ready ones and due ones.

    Paused queues are not counted, and at most ``most`` ready tasks of each queue and ``most`` due ones in all.
    """
    paused = paused_queues(using)
    wanted = [queue for queue in queues or ready_queues(using) if queue not in paused]
    waiting = due(rows_of("Task", using)).exclude(queue__in=paused)
    if queues:
        waiting = waiting.filter(queue__in=queues)
    return int(waiting.order_by("run_after")[:most].count()) + sum(
        count for count, _ in _count_ready(using, wanted, most).values()
    )


def in_status(tasks: Any, status: str) -> Any:
    """Return those of the tasks that have this status. An index has them in the order of status and id."""
    if status == TaskStatus.SUCCESSFUL:
        # Most tasks have this one, so a walk along the primary key finds them at once.
        return tasks.filter(status=status)
    # COUNT_OTHERS says why a range.
    return tasks.filter(status__range=(status, status)).exclude(status=TaskStatus.SUCCESSFUL)


def search_end(tasks: Any) -> int | None:
    """Return the id behind the first ``MOST_SEARCHED`` of these tasks, None when there are no more than that."""
    return next(iter(tasks.values_list("pk", flat=True)[MOST_SEARCHED : MOST_SEARCHED + 1]), None)


def _count_ready(using: str, queues: Collection[str], most: int) -> dict[str, tuple[int, float | None]]:
    rows = run(using, COUNT_READY, sorted(set(queues)), most, most)
    return {queue: (min(count, most), oldest) for queue, count, oldest in rows}


def _count_others(using: str, most: int) -> tuple[dict[str, dict[str, int]], set[str]]:
    """Return the counts by queue and status, and the statuses of which there may be more."""
    by_queue: dict[str, dict[str, int]] = {}
    totals: Counter[str] = Counter()
    for status, queue, count in run(using, COUNT_OTHERS, most):
        by_queue.setdefault(queue, {})[status] = count
        totals[status] += count
    return by_queue, {status for status, total in totals.items() if total >= most}
