"""The history of attempts: how many ended with which outcome, how long they waited and ran, per minute and hour.

Workers count the attempts that they have settled. Once a minute they add the numbers to the rows of the minute and of
the hour. So a series in hours need not sum up minutes. Rows of minutes are deleted after two days, rows of hours after
ninety. If a worker is killed, the numbers that it has not written yet are lost.

Each period has one row for each queue and function, one row for each queue, and one row for all tasks. So for all
tasks, one queue, or one function in a queue, a point of one minute or one hour is one row. In the row of all tasks
queue and function are empty. In the row of a queue the function is empty.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import accumulate
from operator import add
from typing import Any, cast

from django.db.models import F, Sum
from django.utils.timezone import now

from django_pglock.store.statements import LIMIT_WAITS, rows_of, run, run_together
from django_pglock.store.windows import WINDOW
from django_pglock.tasks.claim import date_of

#: The upper bounds of the buckets in seconds. One more bucket is for longer durations.
BOUNDS = tuple(0.001 * 2 ** (step / 2) for step in range(61))
#: The number of buckets.
BUCKETS = len(BOUNDS) + 1
#: The bounds of one bucket differ by this factor.
FACTOR = math.sqrt(2)


def bucket_of(seconds: float) -> int:
    """Return the bucket number of a duration. A negative one, from clocks that differ, is in the first bucket."""
    return bisect_left(BOUNDS, seconds)


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Return the quantile of the counted durations for ``share``, in seconds; None if nothing was counted.

    ``counts`` are the numbers of durations by bucket. Missing buckets at the end are empty. The durations of a bucket
    are taken as evenly distributed on a logarithmic scale, so the error is a factor of 1.41 at most. In the first
    bucket, whose lower bound is zero, they are taken as evenly distributed on a linear scale.
    """
    ends = list(accumulate(counts))
    wanted = share * ends[-1] if ends else 0
    if not wanted:
        return None
    bucket = bisect_left(ends, wanted)
    within = 1 - (ends[bucket] - wanted) / counts[bucket]
    if bucket == 0:
        return BOUNDS[0] * within
    return float(BOUNDS[bucket - 1] * FACTOR**within)


#: Seconds of the two kinds of periods, and for how many seconds their rows are kept.
MINUTE, HOUR = 60, 3600
KEPT = {MINUTE: 2 * 86_400, HOUR: 90 * 86_400}
#: The ways in which an attempt can end. ``lost``: its worker died, or its connection was lost, so its outcome is not
#: known.
OUTCOMES = ("succeeded", "failed", "retried", "cancelled", "snoozed", "lost")
#: The value of queue or function in rows that sum up. No queue and no function has an empty name.
ALL = ""
#: The longest wait for a lock. It is short, because the settler also has outcomes to write.
LONGEST_WAIT = "1s"
#: The most steps of a series.
MOST_POINTS = 10_000
#: A worker writes a minute when it is over, or up to a minute later. So this long ago all workers have written it.
WRITTEN_AFTER = timedelta(minutes=2)
#: The number of minutes of which ``finished_per_minute`` returns the average.
RATE_MINUTES = 5

#: What the row of a period has counted, in the order of the fields of ``Counts``.
NUMBERS = "succeeded, failed, retried, cancelled, snoozed, lost, wait_seconds, run_seconds, wait, run"

# Adds to the rows of periods, element by element. All workers write the same rows, so the rows are passed in a fixed
# order. An array ends at its last bucket that is not empty, so the two arrays may differ in length.
ADD_HISTORY = f"""
INSERT INTO {{task_history}} AS history (seconds, started_at, queue, task_path, {NUMBERS})
SELECT each.seconds, to_timestamp(each.started), each.queue, each.path,
       each.succeeded, each.failed, each.retried, each.cancelled, each.snoozed, each.lost,
       each.wait_seconds, each.run_seconds, each.wait::bigint[], each.run::bigint[]
FROM unnest(
    %s::int[], %s::float8[], %s::text[], %s::text[],
    %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[],
    %s::float8[], %s::float8[], %s::text[], %s::text[])
    AS each (seconds, started, queue, path, {NUMBERS})
ON CONFLICT (seconds, task_path, queue, started_at) DO UPDATE SET
    succeeded = history.succeeded + EXCLUDED.succeeded,
    failed = history.failed + EXCLUDED.failed,
    retried = history.retried + EXCLUDED.retried,
    cancelled = history.cancelled + EXCLUDED.cancelled,
    snoozed = history.snoozed + EXCLUDED.snoozed,
    lost = history.lost + EXCLUDED.lost,
    wait_seconds = history.wait_seconds + EXCLUDED.wait_seconds,
    run_seconds = history.run_seconds + EXCLUDED.run_seconds,
    wait = ARRAY(SELECT COALESCE(mine, 0) + COALESCE(other, 0)
                 FROM unnest(history.wait, EXCLUDED.wait) WITH ORDINALITY AS pair (mine, other, place) ORDER BY place),
    run = ARRAY(SELECT COALESCE(mine, 0) + COALESCE(other, 0)
                FROM unnest(history.run, EXCLUDED.run) WITH ORDINALITY AS pair (mine, other, place) ORDER BY place)
"""

CLOCK = "SELECT date_part('epoch', clock_timestamp())"

# The rows of some periods of one length, for one queue and one function. Each of these names may be empty.
HISTORY_OF = f"""
SELECT date_part('epoch', started_at), {NUMBERS} FROM {{task_history}}
WHERE seconds = %s AND task_path = %s AND queue = %s AND started_at >= %s AND started_at < %s
"""

# The same for one function in all queues.
HISTORY_OF_FUNCTION = f"""
SELECT date_part('epoch', started_at), {NUMBERS} FROM {{task_history}}
WHERE seconds = %s AND task_path = %s AND queue <> '' AND started_at >= %s AND started_at < %s
"""

# The sum of the histograms of a column, bucket by bucket.
_SUMMED = """{column} AS (
    SELECT queue, task_path, array_agg(count ORDER BY bucket) AS counts FROM (
        SELECT queue, task_path, bucket, sum(count)::bigint AS count
        FROM found CROSS JOIN LATERAL unnest(found.{column}) WITH ORDINALITY AS each (count, bucket)
        GROUP BY queue, task_path, bucket) AS buckets
    GROUP BY queue, task_path
)"""

# All rows of some periods, for queues or for functions. Numbers and buckets of the histograms are summed up in one
# pass, so each row is read once.
TOTAL_HISTORY = f"""
WITH found AS MATERIALIZED (
    SELECT queue, task_path, {NUMBERS} FROM {{task_history}}
    WHERE seconds = %s AND started_at >= %s AND started_at < %s AND (task_path <> '') = %s AND queue <> ''
      AND queue = COALESCE(%s::text, queue) AND task_path = COALESCE(%s::text, task_path)
), {_SUMMED.format(column="wait")}, {_SUMMED.format(column="run")}, sums AS (
    SELECT queue, task_path, sum(succeeded)::bigint, sum(failed)::bigint, sum(retried)::bigint, sum(cancelled)::bigint,
           sum(snoozed)::bigint, sum(lost)::bigint, sum(wait_seconds), sum(run_seconds)
    FROM found GROUP BY queue, task_path
)
SELECT sums.*, COALESCE(wait.counts, '{{{{}}}}'), COALESCE(run.counts, '{{{{}}}}')
FROM sums LEFT JOIN wait USING (queue, task_path) LEFT JOIN run USING (queue, task_path)
"""

# Deletes some of the rows that are too old. Two workers may do so at once: each skips the rows that the other has
# locked.
PRUNE_HISTORY = """
WITH old AS MATERIALIZED (
    SELECT id FROM {task_history}
    WHERE seconds = %s AND started_at < clock_timestamp() - make_interval(secs => %s)
    ORDER BY started_at LIMIT %s FOR UPDATE SKIP LOCKED
)
DELETE FROM {task_history} WHERE id = ANY (ARRAY(SELECT id FROM old))
RETURNING id
"""


@dataclass(slots=True)
class Counts:
    """How many attempts ended with which outcome, and how long they waited and ran.

    ``wait`` and ``run`` are the numbers of attempts by bucket. ``wait_seconds`` and ``run_seconds``
    are the sums. An attempt whose function was not called is in none of them. A task that a person has made ready has
    no wait.
    """

    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    cancelled: int = 0
    snoozed: int = 0
    lost: int = 0
    wait_seconds: float = 0.0
    run_seconds: float = 0.0
    wait: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    run: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    @property
    def attempts(self) -> int:
        """The number of all attempts."""
        return sum(getattr(self, outcome) for outcome in OUTCOMES)

    @property
    def finished(self) -> int:
        """The number of attempts that were the last of their task."""
        return self.succeeded + self.failed + self.cancelled

    def wait_quantile(self, share: float) -> float | None:
        """Return the quantile of the seconds from ready to claimed for ``share``; None if there was no attempt."""
        return quantile(self.wait, share)

    def run_quantile(self, share: float) -> float | None:
        """Return the quantile of the seconds for which attempts ran; None if there was no attempt."""
        return quantile(self.run, share)

    def add(self, other: Counts) -> None:
        """Add other numbers to these."""
        # Each by its name, because metrics add the numbers of hundreds of functions for each scrape.
        self.succeeded += other.succeeded
        self.failed += other.failed
        self.retried += other.retried
        self.cancelled += other.cancelled
        self.snoozed += other.snoozed
        self.lost += other.lost
        self.wait_seconds += other.wait_seconds
        self.run_seconds += other.run_seconds
        self.wait = list(map(add, self.wait, other.wait))
        self.run = list(map(add, self.run, other.run))

    def columns(self) -> tuple[Any, ...]:
        """Return the values of a row."""
        numbers = [getattr(self, name) for name in (*OUTCOMES, "wait_seconds", "run_seconds")]
        return *numbers, _array(self.wait), _array(self.run)

    @classmethod
    def of(cls, *columns: Any) -> Counts:
        """Return the numbers of a row."""
        counts = cls(*columns)
        for buckets in (counts.wait, counts.run):
            buckets.extend([0] * (BUCKETS - len(buckets)))
        return counts


@dataclass(frozen=True, slots=True)
class Point:
    """One step of a series: its start, and the attempts that ended in it."""

    started_at: datetime
    counts: Counts


@dataclass(frozen=True, slots=True)
class Total:
    """The attempts that ended in one queue. If ``task_path`` is not empty: only those of this function."""

    queue: str
    task_path: str
    counts: Counts


#: Counted attempts by the start of their minute (in seconds since the epoch), queue and function.
Counted = Mapping[tuple[int, str, str], Counts]


def add_history(using: str, counted: Counted) -> float:
    """Add the counts of some minutes to the rows of these minutes, of their hours, and of the sums.

    Returns the database's time in seconds since the epoch. Sends one message. Raises ``OperationalError`` if the table
    or a row stays locked for longer than a second.
    """
    # Every worker writes the rows in this order, so two workers cannot deadlock. The rows that all workers share are
    # the last ones.
    rows = sorted(_rows(counted).items(), reverse=True)
    values = [(seconds, float(started), queue, path, *each.columns()) for (seconds, path, queue, started), each in rows]
    columns = list(map(list, zip(*values, strict=True)))
    # A statement takes the lock of the table before it can set a limit. So a statement before it sets the limit.
    [(seconds,)] = run_together(using, (LIMIT_WAITS, [LONGEST_WAIT]), (ADD_HISTORY, columns), (CLOCK, []))
    return float(seconds)


def add_rescued(using: str, rescued: Iterable[tuple[str, str, str]]) -> None:
    """Count the attempts of rescued tasks. ``rescued`` has queue, function and new status of each task.

    If the status is FAILED or CANCELLED, the attempt was the last of its task. Otherwise it counts as ``lost``.
    """
    names = {"FAILED": "failed", "CANCELLED": "cancelled"}
    by_outcome = Counter((queue, path, names.get(status, "lost")) for queue, path, status in rescued)
    if by_outcome:
        minute = int(clock(using) // MINUTE * MINUTE)
        counted: dict[tuple[int, str, str], Counts] = {}
        for (queue, path, name), number in by_outcome.items():
            setattr(counted.setdefault((minute, queue, path), Counts()), name, number)
        add_history(using, counted)


def series(
    using: str,
    since: datetime,
    until: datetime,
    step: timedelta | float,
    queue: str | None = None,
    task_path: str | None = None,
) -> list[Point]:
    """Return the attempts that ended between two moments, in steps of ``step`` seconds. Each step has a point.

    ``queue`` and ``task_path`` choose one queue, one function, or one function in one queue. Without them all attempts
    are counted. Steps are whole minutes and begin at multiples of ``step`` since the epoch, the first one at or before
    ``since``. Minutes are stored for two days, hours for ninety. If ``step`` is a whole number of hours, hours are
    read. Attempts of the last minute may be missing. Raises ``ValueError`` for a step that is not a whole number of
    minutes, and for more than ``MOST_POINTS`` steps.
    """
    seconds = int(step.total_seconds() if isinstance(step, timedelta) else step)
    if seconds < MINUTE or seconds % MINUTE:
        raise ValueError(f"step is {step!r}; give a whole number of minutes, in seconds.")
    first, end = _floor(since, seconds), until.timestamp()
    starts = range(first, math.ceil(end), seconds)
    if len(starts) > MOST_POINTS:
        raise ValueError(f"There are {len(starts):,} steps; give a step with which there are {MOST_POINTS:,} at most.")
    points = {start: Counts() for start in starts}
    period = MINUTE if seconds % HOUR else HOUR
    for started, *columns in _history_of(using, period, queue, task_path, (first, end)):
        points[int(started) // seconds * seconds].add(Counts.of(*columns))
    return [Point(cast("datetime", date_of(started)), counts) for started, counts in points.items()]


def totals(
    using: str,
    since: datetime,
    until: datetime,
    *,
    by_function: bool = True,
    queue: str | None = None,
    task_path: str | None = None,
) -> list[Total]:
    """Return the attempts that ended between two moments, by queue and function, or only by queue; most attempts first.

    ``queue`` and ``task_path`` choose one queue or function. Up to three hours are read from the minutes, longer times
    from the hours. The minutes or hours that contain ``since`` and ``until`` are counted as a whole.
    """
    period = MINUTE if (until - since).total_seconds() <= 3 * HOUR else HOUR
    span = (_date(_floor(since, period)), _date(until.timestamp()))
    found = run(using, TOTAL_HISTORY, period, *span, by_function or task_path is not None, queue, task_path)
    result = [Total(queue_, path, Counts.of(*columns)) for queue_, path, *columns in found]
    return sorted(result, key=lambda total: (-total.counts.attempts, total.queue, total.task_path))


def finished_per_minute(using: str, queues: Collection[str]) -> dict[str, float]:
    """Return how many tasks of these queues finished in a minute: the average of the last minutes that are written.

    A queue without attempts in these minutes is left out.
    """
    last = now() - WRITTEN_AFTER
    rows = rows_of("TaskHistory", using).filter(seconds=MINUTE, task_path=ALL, queue__in=queues)
    rows = rows.filter(started_at__gt=last - timedelta(minutes=RATE_MINUTES), started_at__lte=last)
    # As ``Counts.finished``.
    finished = Sum(F("succeeded") + F("failed") + F("cancelled"))
    return {queue: count / RATE_MINUTES for queue, count in rows.values_list("queue").annotate(finished=finished)}


def clock(using: str) -> float:
    """Return the database's time in seconds since the epoch."""
    [(seconds,)] = run(using, CLOCK)
    return float(seconds)


def prune_history(using: str, *, batch: int = WINDOW) -> int:
    """Delete old rows, at most ``batch`` rows of minutes and ``batch`` rows of hours. Returns how many."""
    return sum(len(run(using, PRUNE_HISTORY, seconds, float(age), batch)) for seconds, age in KEPT.items())


def _rows(counted: Counted) -> dict[tuple[int, str, str, int], Counts]:
    """Return the counts to add, by row: length of the period in seconds, function, queue and start."""
    rows: dict[tuple[int, str, str, int], Counts] = {}
    for (minute, queue, path), counts in counted.items():
        for seconds in KEPT:
            for key in ((path, queue), (ALL, queue), (ALL, ALL)):
                rows.setdefault((seconds, *key, minute // seconds * seconds), Counts()).add(counts)
    return rows


def _history_of(
    using: str, period: int, queue: str | None, task_path: str | None, span: tuple[float, float]
) -> Iterator[tuple[Any, ...]]:
    dates = map(_date, span)
    if task_path is not None and queue is None:
        yield from run(using, HISTORY_OF_FUNCTION, period, task_path, *dates)
    else:
        yield from run(using, HISTORY_OF, period, task_path or ALL, queue or ALL, *dates)


def _array(counts: list[int]) -> str:
    """Return the counts as PostgreSQL writes an array, without the empty buckets at the end."""
    filled = len(counts)
    while filled and not counts[filled - 1]:
        filled -= 1
    return "{" + ",".join(map(str, counts[:filled])) + "}"


def _floor(moment: datetime, seconds: int) -> int:
    return int(moment.timestamp() // seconds * seconds)


def _date(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, tz=timezone.utc)
