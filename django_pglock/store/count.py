"""Counts the tasks of the queues. A count stops at a limit, because to count ten million rows takes seconds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from django_pglock.store.failures import FIND_GROUPS, MOST_FOUND
from django_pglock.store.ready import paused_queues, ready_queues
from django_pglock.store.statements import MOST_COUNTED, run

#: The age of the oldest ready task of a queue is read from this number of tasks, those with the lowest ids. One is not
#: enough: the task with the lowest id may have become due just now.
OLDEST = 3
#: The largest number of tasks that are searched without a fitting index: that takes less than 50 ms.
MOST_SEARCHED = 20_000
#: The statuses that are counted. The statements name them again.
COUNTED = ("READY", "BLOCKED", "SCHEDULED", "RUNNING", "FAILED")
#: What suspends a task between two of its steps.
SUSPENDED = ("SLEEP", "EVENT", "CHILDREN")

# How many tasks of each queue are ready, and for how many seconds the oldest of them has been ready. A limited number
# of entries of each queue is read, from the two indexes of ready tasks. Only for the tasks with the lowest ids the rows
# are read, too, because to read the rows of 229,000 tasks took seconds. ready.py says why the limits are subqueries.
COUNT_READY = """
SELECT name.queue, ready.count, EXTRACT(EPOCH FROM clock_timestamp() - (
    SELECT min(GREATEST(task.enqueued_at, task.run_after)) FROM {task} AS task WHERE task.id = ANY (ready.oldest)
))::float8
FROM unnest(%s::text[]) AS name (queue) CROSS JOIN LATERAL (
    SELECT count(*) AS count, (array_agg(each.id ORDER BY each.id))[1:%s] AS oldest FROM (
        (SELECT task.id FROM {task} AS task
         WHERE task.status = 'READY' AND task.fair_key IS NULL AND task.queue = name.queue
         ORDER BY task.queue, task.priority DESC, task.id LIMIT (SELECT %s::bigint))
        UNION ALL
        (SELECT task.id FROM {task} AS task
         WHERE task.status = 'READY' AND task.fair_key IS NOT NULL AND task.queue = name.queue
         ORDER BY task.queue, task.fair_key, task.priority DESC, task.id LIMIT (SELECT %s::bigint))) AS each) AS ready
WHERE ready.count > 0
"""

# How many tasks of each queue have failed, and whether there may be more. The index of fingerprints has the queues.
# The newest tasks of each group are read, up to a limit: so an incident hides no other failures. Rows that other
# programs have written may have no fingerprint.
COUNT_FAILED = f"""{FIND_GROUPS}
SELECT part.queue, sum(part.count)::bigint, bool_or(part.is_cut)
FROM (SELECT fingerprint FROM found UNION ALL SELECT NULL) AS wanted
CROSS JOIN LATERAL (
    SELECT newest.queue, count(*) AS count, sum(count(*)) OVER () >= %s AS is_cut
    FROM ((SELECT task.queue FROM {{task}} AS task
           WHERE task.status = 'FAILED' AND task.fingerprint = wanted.fingerprint
           ORDER BY task.fingerprint DESC, task.id DESC LIMIT (SELECT %s::bigint))
          UNION ALL
          (SELECT task.queue FROM {{task}} AS task
           WHERE task.status = 'FAILED' AND task.fingerprint IS NULL AND wanted.fingerprint IS NULL
           ORDER BY task.fingerprint DESC, task.id DESC LIMIT (SELECT %s::bigint))) AS newest
    GROUP BY newest.queue) AS part
GROUP BY part.queue
"""

# The newest tasks of each other unfinished status, by queue. No index has their queues. The statuses are a range, read
# in the order of the index. With "=" the planner may choose the primary key, because it expects to find these tasks
# soon. It would then read all tasks that have succeeded.
COUNT_OTHERS = """
SELECT newest.status, newest.queue, count(*)
FROM unnest(ARRAY['BLOCKED', 'SCHEDULED', 'RUNNING']) AS wanted (status) CROSS JOIN LATERAL (
    SELECT task.status, task.queue FROM {task} AS task
    WHERE task.status BETWEEN wanted.status AND wanted.status AND task.status <> 'SUCCESSFUL'
    ORDER BY task.status DESC, task.id DESC LIMIT (SELECT %s::bigint)) AS newest
GROUP BY newest.status, newest.queue
"""

# The suspended ones of these tasks, by queue and by what suspends them. A claim writes nothing to the records of steps,
# so a sleep is known by its attempt.
COUNT_SUSPENDED = """
SELECT newest.queue, COALESCE(step.kind, 'CHILDREN') AS kind, count(*)
FROM unnest(ARRAY['BLOCKED', 'SCHEDULED']) AS wanted (status) CROSS JOIN LATERAL (
    SELECT task.id, task.status, task.queue, task.attempts, task.worker, task.waits_for FROM {task} AS task
    WHERE task.status BETWEEN wanted.status AND wanted.status AND task.status <> 'SUCCESSFUL'
    ORDER BY task.status DESC, task.id DESC LIMIT (SELECT %s::bigint)) AS newest
LEFT JOIN LATERAL (
    SELECT step.kind FROM {step} AS step
    WHERE newest.status = 'SCHEDULED' AND newest.attempts > 0 AND step.task_id = newest.id
      AND step.attempt = newest.attempts AND step.finished_at IS NULL AND step.kind IN ('SLEEP', 'EVENT')
    LIMIT 1) AS step ON true
WHERE step.kind IS NOT NULL OR (newest.status = 'BLOCKED' AND newest.worker IS NOT NULL AND newest.waits_for > 0)
GROUP BY newest.queue, COALESCE(step.kind, 'CHILDREN')
"""


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """One queue: its tasks by status, the seconds for which the oldest has been ready, and since when it is paused.

    For a status in ``at_least`` there may be more tasks than counted. The oldest ready task may then be older, too.
    """

    queue: str
    counts: Mapping[str, int]
    oldest_ready: float | None
    paused_at: datetime | None
    at_least: frozenset[str]

    @classmethod
    def of(
        cls, queue: str, counts: Mapping[str, int], oldest_ready: float | None, paused_at: datetime | None
    ) -> QueueCounts:
        """Return the counts of a queue that were made with the usual limit."""
        at_least = frozenset(status for status, count in counts.items() if count >= MOST_COUNTED)
        return cls(queue, counts, oldest_ready, paused_at, at_least)


def queue_counts(using: str, *, most: int = MOST_COUNTED) -> list[QueueCounts]:
    """Return the counts of each queue that has unfinished or failed tasks, or is paused, in the order of the names.

    At most ``most`` ready tasks of each queue are counted, ``most`` failed tasks of each group of failures, and
    ``most`` tasks of each other status in all queues together, the newest.
    """
    counts: defaultdict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTED, 0))
    at_least: defaultdict[str, set[str]] = defaultdict(set)
    oldest: dict[str, float] = {}
    for queue, count, is_cut in run(using, COUNT_FAILED, MOST_FOUND, *[most] * 3):
        counts[queue]["FAILED"] = count
        at_least[queue] |= {"FAILED"} if is_cut else set()
    for queue, count, age in run(using, COUNT_READY, list(ready_queues(using)), OLDEST, most, most):
        counts[queue]["READY"], oldest[queue] = min(count, most), age
        at_least[queue] |= {"READY"} if count >= most else set()
    totals: Counter[str] = Counter()
    for status, queue, count in run(using, COUNT_OTHERS, most):
        counts[queue][status] = count
        totals[status] += count
    capped = {status for status, total in totals.items() if total >= most}
    paused = paused_queues(using)
    return [
        QueueCounts(queue, counts[queue], oldest.get(queue), paused.get(queue), frozenset(at_least[queue] | capped))
        for queue in sorted({*counts, *paused})
    ]


def suspended_counts(using: str, *, most: int = MOST_COUNTED) -> list[tuple[str, str, int]]:
    """Return queue, kind and number of the suspended tasks, among the newest ``most`` of each status."""
    return run(using, COUNT_SUSPENDED, most)
