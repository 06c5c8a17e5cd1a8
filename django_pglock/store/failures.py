"""Groups of failed tasks: failures of one function, with one exception, raised in one place, have the same fingerprint.

A worker writes the fingerprint with the failure (settle.py). A task has no fingerprint if it failed because its worker
died. Such tasks are grouped by function and exception. Their group has the fingerprint of a failure whose place is not
known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

from django.db.models import CharField, OuterRef, Subquery, Value
from django.db.models.functions import Coalesce

from django_pglock.store.count import MOST_COUNTED
from django_pglock.store.statements import rows_of, run
from django_pglock.tasks.states import TaskStatus
from django_pglock.tasks.tracebacks import fingerprint_of, message_in, place_in

#: The largest number of groups that are returned, and that are read to find those with the latest failures.
MOST_GROUPS, MOST_FOUND = 100, 1000
#: The largest number of failed tasks without a fingerprint that are read: a row of the task, and a row of its attempt.
MOST_WITHOUT_FINGERPRINT = 500
#: The number of characters that are read from the end of a traceback.
MOST_READ = 20_000
#: Hours for which failures are counted by the hour.
HOURS = 24

# The groups of failed tasks, those with the latest failures first. One index probe finds each fingerprint. A group
# is counted in the same index, the newest tasks first, up to a limit. The index has the dates, too. ready.py says why
# the limits are subqueries. Hour 24 is the last hour. Hour 0 is all time before hour 1. The beginning of a traceback is
# read, too, because the message at its end may have any length.
FAILURE_GROUPS = """
WITH RECURSIVE found AS (
    (SELECT fingerprint, 1 AS number FROM {task} WHERE status = 'FAILED' AND fingerprint IS NOT NULL
     ORDER BY fingerprint LIMIT 1)
    UNION ALL
    SELECT next.fingerprint, found.number + 1 FROM found CROSS JOIN LATERAL (
        SELECT task.fingerprint FROM {task} AS task
        WHERE task.status = 'FAILED' AND task.fingerprint > found.fingerprint
        ORDER BY task.fingerprint LIMIT 1) AS next
    WHERE found.number < %s
), shown AS MATERIALIZED (
    SELECT found.fingerprint, newest.id
    FROM found CROSS JOIN LATERAL (
        SELECT task.id, task.finished_at FROM {task} AS task
        WHERE task.status = 'FAILED' AND task.fingerprint = found.fingerprint
        ORDER BY task.fingerprint DESC, task.id DESC LIMIT 1) AS newest
    ORDER BY newest.finished_at DESC LIMIT (SELECT %s::bigint)
), hour AS MATERIALIZED (
    SELECT array_agg(statement_timestamp() - make_interval(hours => n) ORDER BY n DESC) AS begins
    FROM generate_series(1, %s) AS n
)
SELECT shown.fingerprint, task.task_path, COALESCE(last.exception_path, ''), COALESCE(last.trace, ''), shown.id,
       counted.count, LEAST(counted.first_at, oldest.finished_at), counted.last_at, counted.hours, counted.counts
FROM shown JOIN {task} AS task ON task.id = shown.id AND task.id = ANY (ARRAY(SELECT id FROM shown))
CROSS JOIN LATERAL (
    SELECT sum(each.count)::bigint AS count, min(each.first_at) AS first_at, max(each.last_at) AS last_at,
           array_agg(each.hour) AS hours, array_agg(each.count) AS counts
    FROM (SELECT width_bucket(entry.finished_at, (SELECT begins FROM hour)) AS hour, count(*) AS count,
                 min(entry.finished_at) AS first_at, max(entry.finished_at) AS last_at
          FROM (SELECT task.finished_at FROM {task} AS task
                WHERE task.status = 'FAILED' AND task.fingerprint = shown.fingerprint
                ORDER BY task.fingerprint DESC, task.id DESC LIMIT (SELECT %s::bigint)) AS entry
          GROUP BY 1) AS each) AS counted
CROSS JOIN LATERAL (
    SELECT task.finished_at FROM {task} AS task
    WHERE task.status = 'FAILED' AND task.fingerprint = shown.fingerprint
    ORDER BY task.fingerprint, task.id LIMIT 1) AS oldest
LEFT JOIN LATERAL (
    SELECT attempt.exception_path,
           left(attempt.traceback, 4000) || chr(10) || right(attempt.traceback, %s) AS trace
    FROM {attempt} AS attempt
    WHERE attempt.task_id = shown.id ORDER BY attempt.number DESC LIMIT 1) AS last ON true
"""

# The newest failed tasks without a fingerprint, each with its exception. They are at the end of the index.
FAILURES_WITHOUT_FINGERPRINT = """
WITH newest AS MATERIALIZED (
    SELECT id, task_path, finished_at FROM {task} WHERE status = 'FAILED' AND fingerprint IS NULL
    ORDER BY fingerprint DESC, id DESC LIMIT (SELECT %s::bigint)
)
SELECT newest.id, newest.task_path, COALESCE(last.exception_path, ''), newest.finished_at,
       EXTRACT(EPOCH FROM statement_timestamp() - newest.finished_at)::float8
FROM newest LEFT JOIN LATERAL (
    SELECT attempt.exception_path FROM {attempt} AS attempt
    WHERE attempt.task_id = newest.id ORDER BY attempt.number DESC LIMIT 1) AS last ON true
ORDER BY newest.id DESC
"""

# The beginning and the end of the last traceback of each of a few tasks.
LAST_TRACEBACKS = """
SELECT wanted.id, (SELECT left(attempt.traceback, 4000) || chr(10) || right(attempt.traceback, %s)
                   FROM {attempt} AS attempt
                   WHERE attempt.task_id = wanted.id ORDER BY attempt.number DESC LIMIT 1)
FROM unnest(%s::bigint[]) AS wanted (id)
"""


class FailureGroupId(NamedTuple):
    """Identifies a group of failures. The two paths find the tasks without a fingerprint."""

    fingerprint: int
    task_path: str
    #: Empty if no attempt is recorded.
    exception_path: str

    @property
    def may_lack_fingerprint(self) -> bool:
        """Whether tasks without a fingerprint may belong to the group."""
        return self.fingerprint == fingerprint_of(self.task_path, self.exception_path)


@dataclass(frozen=True, slots=True)
class FailureCounts:
    """Failed tasks of one function with one exception, raised in one place of the project."""

    #: The value of the column ``fingerprint`` in the tasks of the group. A group of tasks without it has one, too.
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
    def group(self) -> FailureGroupId:
        """The identity of the group."""
        return FailureGroupId(self.fingerprint, self.task_path, self.exception_path)

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
    - ``most``: the largest number of tasks that are counted in a group. Of the tasks without a fingerprint, at most 500
      are counted.
    """
    rows = run(using, FAILURE_GROUPS, MOST_FOUND, limit, HOURS, most, MOST_READ)
    groups = {row[0]: _group_of(row, most) for row in rows}
    for group in _groups_without_fingerprint(using):
        known = groups.get(group.fingerprint)
        groups[group.fingerprint] = group if known is None else _joined(known, group)
    return sorted(groups.values(), key=lambda group: group.last_at, reverse=True)[:limit]


def find_failure_group(using: str, fingerprint: int) -> FailureGroupId | None:
    """Return the group with this fingerprint; None if it has no task."""
    newest = with_fingerprint(rows_of("Task", using), fingerprint).order_by("-fingerprint", "-pk")
    for id_, task_path in newest.values_list("pk", "task_path")[:1]:
        attempts = rows_of("Attempt", using).filter(task=id_).order_by("-number")
        return FailureGroupId(
            fingerprint, task_path, next(iter(attempts.values_list("exception_path", flat=True)[:1]), "")
        )
    return next((each.group for each in _groups_without_fingerprint(using) if each.fingerprint == fingerprint), None)


def in_group(tasks: Any, group: FailureGroupId) -> Any:
    """Return those of the tasks that have failed and belong to a group."""
    known = with_fingerprint(tasks, group.fingerprint)
    if not group.may_lack_fingerprint:
        return known
    return known | tasks.filter(pk__in=without_fingerprint(tasks, group).order_by().values("pk"))


def with_fingerprint(tasks: Any, fingerprint: int) -> Any:
    """Return those of the tasks that have failed with this fingerprint.

    The condition is a range. If the tasks are also ordered by fingerprint and id, only the index of groups has this
    order. With "=" the planner may choose the primary key, and would then read all tasks that have succeeded.
    """
    return tasks.filter(status=TaskStatus.FAILED, fingerprint__range=(fingerprint, fingerprint))


def without_fingerprint(tasks: Any, group: FailureGroupId) -> Any:
    """Return the failed tasks without a fingerprint whose function and exception are those of a group."""
    _, task_path, exception_path = group
    attempts = rows_of("Attempt", tasks.db).filter(task=OuterRef("pk")).order_by("-number")
    exception = Coalesce(Subquery(attempts.values("exception_path")[:1]), Value(""), output_field=CharField())
    failed = tasks.filter(status=TaskStatus.FAILED, fingerprint=None, task_path=task_path)
    return failed.alias(_exception=exception).filter(_exception=exception_path)


def _group_of(row: tuple[Any, ...], most: int) -> FailureCounts:
    fingerprint, path, exception, trace, newest, count, first, last, hours, counts = row
    by_hour = dict(zip(hours, counts, strict=True))
    return FailureCounts(
        *(fingerprint, path, exception, place_in(trace), message_in(trace, exception), newest, count, count >= most),
        *(first, last, tuple(by_hour.get(hour, 0) for hour in range(1, HOURS + 1))),
    )


def _groups_without_fingerprint(using: str) -> Iterable[FailureCounts]:
    rows = run(using, FAILURES_WITHOUT_FINGERPRINT, MOST_WITHOUT_FINGERPRINT)
    by_kind: dict[tuple[str, str], list[tuple[int, datetime, float]]] = {}
    for id_, path, exception, finished_at, age in rows:
        by_kind.setdefault((path, exception), []).append((id_, finished_at, age))
    if not by_kind:
        return []
    traces = dict(run(using, LAST_TRACEBACKS, MOST_READ, [found[0][0] for found in by_kind.values()]))
    groups = []
    for (path, exception), found in by_kind.items():
        newest, fingerprint, by_hour = found[0][0], fingerprint_of(path, exception), [0] * HOURS
        for _, _, age in found:
            if 0 <= age < HOURS * 3600:
                by_hour[HOURS - 1 - int(age / 3600)] += 1
        dates, trace = [date for _, date, _ in found], traces[newest] or ""
        groups.append(
            FailureCounts(
                *(fingerprint, path, exception, place_in(trace), message_in(trace, exception), newest, len(found)),
                *(len(rows) >= MOST_WITHOUT_FINGERPRINT, min(dates), max(dates), tuple(by_hour)),
            )
        )
    return groups


def _joined(group: FailureCounts, other: FailureCounts) -> FailureCounts:
    """Return a group together with those of its tasks that have no fingerprint."""
    return replace(
        group if group.newest > other.newest else other,
        count=group.count + other.count,
        is_capped=group.is_capped or other.is_capped,
        first_at=min(group.first_at, other.first_at),
        last_at=max(group.last_at, other.last_at),
        by_hour=tuple(map(sum, zip(group.by_hour, other.by_hour, strict=True))),
    )
