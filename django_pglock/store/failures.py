"""Groups of failed tasks: failures of one function, with one exception, raised in one place, have the same fingerprint.

The fingerprint is written with the failure: by the worker (settle.py), or by the rescue of a task whose worker died
(rescue.py), which knows no place. A group is its fingerprint.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django_pglock.error_reading import message_in, place_in
from django_pglock.store.statements import MOST_COUNTED, rows_of, run
from django_pglock.tasks.states import TaskStatus

#: The largest number of groups that are returned, and that are read to find those with the latest failures.
MOST_GROUPS, MOST_FOUND = 100, 1000
#: The number of characters that are read from the end of a traceback.
MOST_READ = 20_000
#: Hours for which failures are counted by the hour.
HOURS = 24

# The groups of failed tasks: one index probe finds each fingerprint.
FIND_GROUPS = """
WITH RECURSIVE found AS (
    (SELECT fingerprint, 1 AS number FROM {task} WHERE status = 'FAILED' AND fingerprint IS NOT NULL
     ORDER BY fingerprint LIMIT 1)
    UNION ALL
    SELECT next.fingerprint, found.number + 1 FROM found CROSS JOIN LATERAL (
        SELECT task.fingerprint FROM {task} AS task
        WHERE task.status = 'FAILED' AND task.fingerprint > found.fingerprint
        ORDER BY task.fingerprint LIMIT 1) AS next
    WHERE found.number < %s
)"""

# Those with the latest failures first. A group is counted in the same index, the newest tasks first, up to a limit. The
# index has the dates, too. ready.py says why the limits are subqueries. Hour 24 is the last hour. Hour 0 is all time
# before hour 1. The beginning of a traceback is read, too, because the message at its end may have any length.
FAILURE_GROUPS = f"""{FIND_GROUPS}, shown AS MATERIALIZED (
    SELECT found.fingerprint, newest.id
    FROM found CROSS JOIN LATERAL (
        SELECT task.id, task.finished_at FROM {{task}} AS task
        WHERE task.status = 'FAILED' AND task.fingerprint = found.fingerprint
        ORDER BY task.fingerprint DESC, task.id DESC LIMIT 1) AS newest
    ORDER BY newest.finished_at DESC LIMIT (SELECT %s::bigint)
), hour AS MATERIALIZED (
    SELECT array_agg(statement_timestamp() - make_interval(hours => n) ORDER BY n DESC) AS begins
    FROM generate_series(1, %s) AS n
)
SELECT shown.fingerprint, task.task_path, COALESCE(last.exception_path, ''), COALESCE(last.trace, ''), shown.id,
       counted.count, LEAST(counted.first_at, oldest.finished_at), counted.last_at, counted.hours, counted.counts
FROM shown JOIN {{task}} AS task ON task.id = shown.id AND task.id = ANY (ARRAY(SELECT id FROM shown))
CROSS JOIN LATERAL (
    SELECT sum(each.count)::bigint AS count, min(each.first_at) AS first_at, max(each.last_at) AS last_at,
           array_agg(each.hour) AS hours, array_agg(each.count) AS counts
    FROM (SELECT width_bucket(entry.finished_at, (SELECT begins FROM hour)) AS hour, count(*) AS count,
                 min(entry.finished_at) AS first_at, max(entry.finished_at) AS last_at
          FROM (SELECT task.finished_at FROM {{task}} AS task
                WHERE task.status = 'FAILED' AND task.fingerprint = shown.fingerprint
                ORDER BY task.fingerprint DESC, task.id DESC LIMIT (SELECT %s::bigint)) AS entry
          GROUP BY 1) AS each) AS counted
CROSS JOIN LATERAL (
    SELECT task.finished_at FROM {{task}} AS task
    WHERE task.status = 'FAILED' AND task.fingerprint = shown.fingerprint
    ORDER BY task.fingerprint, task.id LIMIT 1) AS oldest
LEFT JOIN LATERAL (
    SELECT attempt.exception_path,
           left(attempt.traceback, 4000) || chr(10) || right(attempt.traceback, %s) AS trace
    FROM {{attempt}} AS attempt
    WHERE attempt.task_id = shown.id ORDER BY attempt.number DESC LIMIT 1) AS last ON true
"""


@dataclass(frozen=True, slots=True)
class FailureCounts:
    """Failed tasks of one function with one exception, raised in one place of the project."""

    #: The value of the column ``fingerprint`` in the tasks of the group.
    fingerprint: int
    task_path: str
    #: The path of the exception's class; empty if no attempt is recorded.
    exception_path: str
    #: The project's own innermost frame in the traceback of the newest task, such as ``bank.py:88``, and the message;
    #: empty if not known.
    place: str
    message: str
    #: The id of the newest task.
    newest: int
    count: int
    #: Whether there may be more tasks than ``count``.
    is_capped: bool
    #: When the first and the last of these tasks failed. If ``is_capped``, the first is the task with the lowest id.
    first_at: datetime
    last_at: datetime
    #: How many failed in each of the last 24 hours, the oldest hour first.
    by_hour: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the function without its module."""
        return self.task_path.rpartition(".")[2]

    @property
    def exception(self) -> str:
        """The name of the exception without its module."""
        return self.exception_path.rpartition(".")[2]


def failures(using: str, *, limit: int = MOST_GROUPS, most: int = MOST_COUNTED) -> list[FailureCounts]:
    """Return the groups of failed tasks, those with the latest failures first.

    - ``limit``: the largest number of groups that are returned. They are chosen from at most a thousand.
    - ``most``: the largest number of tasks that are counted in a group.
    """
    rows = run(using, FAILURE_GROUPS, MOST_FOUND, limit, HOURS, most, MOST_READ)
    return sorted((_group_of(row, most) for row in rows), key=lambda group: group.last_at, reverse=True)


def newest_failure(using: str, fingerprint: int) -> tuple[str, str] | None:
    """Return the function and the exception of the newest task of a group; None if the group has no task."""
    newest = in_group(rows_of("Task", using), fingerprint).order_by("-fingerprint", "-pk")
    for id_, task_path in newest.values_list("pk", "task_path")[:1]:
        attempts = rows_of("Attempt", using).filter(task=id_).order_by("-number")
        return task_path, next(iter(attempts.values_list("exception_path", flat=True)[:1]), "")
    return None


def in_group(tasks: Any, fingerprint: int) -> Any:
    """Return those of the tasks that have failed with this fingerprint.

    The condition is a range. If the tasks are also ordered by fingerprint and id, only the index of groups has this
    order. With "=" the planner may choose the primary key, and would then read all tasks that have succeeded.
    """
    return tasks.filter(status=TaskStatus.FAILED, fingerprint__range=(fingerprint, fingerprint))


def _group_of(row: tuple[Any, ...], most: int) -> FailureCounts:
    fingerprint, path, exception, trace, newest, count, first, last, hours, counts = row
    by_hour = dict(zip(hours, counts, strict=True))
    return FailureCounts(
        *(fingerprint, path, exception, place_in(trace), message_in(trace, exception), newest, count, count >= most),
        *(first, last, tuple(by_hour.get(hour, 0) for hour in range(1, HOURS + 1))),
    )
