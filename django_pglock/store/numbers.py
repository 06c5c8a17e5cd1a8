"""The numbers: all that is counted of tasks, in one table. Every page, chart, metric and command reads only this.

A row has a period, a kind, a queue, a function, and what was counted: a number, a sum of seconds, and a histogram.

- **Attempts.** Workers count the attempts that they have settled. Once a minute they add the numbers to the rows of the
  minute, of the hour, and of all time. So a series in hours need not sum up minutes, and metrics have counters that
  only grow. Rows of minutes are deleted after two days, rows of hours after ninety. If a worker is killed, the numbers
  that it has not written yet are lost. Each minute and hour has one row for each queue and function, one for each
  queue, and one for all tasks, so a point of a series is one row of each kind. In the row of a queue the function is
  empty, and in the row of all tasks the queue is empty, too.
- **Depths.** How many tasks of each status a queue has, and the age of its oldest ready task, as last counted. One
  worker counts for all. A reader that finds only old counts counts by itself: then no worker runs, and an autoscaler
  may want to know it.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import accumulate
from operator import add
from typing import Any, cast

from django.db import transaction
from django.db.models import Sum
from django.utils.timezone import now

from django_pglock.store.count import COUNTED, SUSPENDED, QueueCounts, queue_counts, suspended_counts
from django_pglock.store.ready import paused_queues
from django_pglock.store.statements import LIMIT_WAITS, WINDOW, rows_of, run
from django_pglock.tasks.claim import date_of

# What is counted of attempts: how many ended with which outcome, and histograms of how long they waited and ran. Pure.
#
# The buckets of a histogram are fixed, so that the histograms of several workers and minutes can be added. The upper
# bounds grow by a factor of the square root of 2, from one millisecond to twelve days. A duration that equals a bound
# belongs to the bucket below it. The buckets of rows that are stored must never change.


#: The upper bounds of the buckets in seconds. One more bucket is for longer durations.
BOUNDS = tuple(0.001 * 2 ** (step / 2) for step in range(61))
#: The number of buckets.
BUCKETS = len(BOUNDS) + 1
#: The bounds of one bucket differ by this factor.
FACTOR = math.sqrt(2)
#: The ways in which an attempt can end. ``lost``: its worker died, or its connection was lost, so its outcome is not
#: known.
OUTCOMES = ("succeeded", "failed", "retried", "cancelled", "snoozed", "lost")
#: The kinds of numbers about attempts: how many ended so, and how long they waited and ran.
WAITED, RAN = "waited", "ran"
#: What attempts have done besides: steps that they have recorded, and waits for an event that ended by their timeout.
STEPS, TIMEOUTS = "steps", "timeouts"
ATTEMPT_KINDS = (*OUTCOMES, STEPS, TIMEOUTS, WAITED, RAN)


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


@dataclass(slots=True)
class Counts:
    """How many attempts ended with which outcome, and how long they waited and ran.

    ``wait`` and ``run`` are the numbers of attempts by bucket. ``wait_seconds`` and ``run_seconds`` are the sums. An
    attempt whose function was not called is in none of them. A task that a person has made ready has no wait.
    """

    succeeded: int = 0
    failed: int = 0
    retried: int = 0
    cancelled: int = 0
    snoozed: int = 0
    lost: int = 0
    steps: int = 0
    timeouts: int = 0
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
        for row in other.rows():
            self.add_row(*row)

    def add_row(self, kind: str, count: int, total: float, buckets: Sequence[int]) -> None:
        """Add the numbers of one row: of one kind."""
        if kind == WAITED:
            self.wait_seconds += total
            self.wait = _added(self.wait, buckets)
        elif kind == RAN:
            self.run_seconds += total
            self.run = _added(self.run, buckets)
        else:
            setattr(self, kind, getattr(self, kind) + count)

    def rows(self) -> Iterator[tuple[str, int, float, list[int]]]:
        """Yield kind, count, sum and buckets of each row that stores these numbers."""
        yield from ((name, count, 0.0, []) for name in (*OUTCOMES, STEPS, TIMEOUTS) if (count := getattr(self, name)))
        for kind, total, buckets in ((WAITED, self.wait_seconds, self.wait), (RAN, self.run_seconds, self.run)):
            if total or any(buckets):
                yield kind, sum(buckets), total, buckets


def _added(counts: list[int], others: Sequence[int]) -> list[int]:
    return [*map(add, counts, others), *counts[len(others) :]]


#: Seconds of the three kinds of periods. The last one has no end: it began with the first task.
MINUTE, HOUR, EVER = 60, 3600, 0
#: For how many seconds the rows of a period are kept.
KEPT = {MINUTE: 2 * 86_400, HOUR: 90 * 86_400}
#: The value of queue or function in rows that sum up. No queue and no function has an empty name.
ALL = ""
#: The longest wait for a lock. It is short, because the settler also has outcomes to write.
LONGEST_WAIT = "1s"
#: A worker writes a minute when it is over, or up to a minute later. So this long ago all workers have written it.
WRITTEN_AFTER = timedelta(minutes=2)
#: The number of minutes of which ``finished_per_minute`` returns the average.
RATE_MINUTES = 5
#: Seconds between two counts of depths by the upkeep. A count that takes long is repeated more rarely: the pause is its
#: duration times the second number.
BETWEEN_DEPTHS, PAUSE_FACTOR = 15.0, 20
#: Seconds after which depths are too old for a reader, so that it counts by itself.
MAX_AGE = 60.0

# Adds to the rows of periods, element by element. All workers write the same rows, so the rows are passed in a fixed
# order. An array ends at its last bucket that is not empty, so the two arrays may differ in length.
ADD_NUMBERS = """
INSERT INTO {number} AS number (seconds, started_at, kind, queue, task_path, count, total, buckets)
SELECT each.seconds, to_timestamp(each.started), each.kind, each.queue, each.path, each.count, each.total,
       each.buckets::bigint[]
FROM unnest(%s::int[], %s::text[], %s::text[], %s::float8[], %s::text[], %s::bigint[], %s::float8[], %s::text[])
    AS each (seconds, path, queue, started, kind, count, total, buckets)
ON CONFLICT (seconds, task_path, queue, started_at, kind) DO UPDATE SET
    count = number.count + EXCLUDED.count,
    total = number.total + EXCLUDED.total,
    buckets = ARRAY(SELECT COALESCE(mine, 0) + COALESCE(other, 0)
                    FROM unnest(number.buckets, EXCLUDED.buckets) WITH ORDINALITY AS pair (mine, other, place)
                    ORDER BY place)
"""

CLOCK = "SELECT date_part('epoch', clock_timestamp())"

# The rows of some periods of one length, for one queue and one function. Each of these names may be empty.
SERIES = """
SELECT date_part('epoch', started_at), kind, count, total, buckets FROM {number}
WHERE seconds = %s AND task_path = %s AND queue = %s AND started_at >= %s AND started_at < %s AND kind = ANY (%s)
"""

# The same for one function in all queues.
SERIES_OF_FUNCTION = SERIES.replace("queue = %s", "queue <> ''")

# All rows of some periods by queue and function, summed up element by element: the sum of seconds, the count, and the
# histogram.
TOTALS = """
SELECT queue, task_path, kind, array_agg(number ORDER BY place) FROM (
    SELECT queue, task_path, kind, place, sum(each.number) AS number
    FROM {number}, unnest(ARRAY[total, count] || buckets::float8[]) WITH ORDINALITY AS each (number, place)
    WHERE seconds = %s AND started_at >= %s AND started_at < %s AND task_path <> '' AND queue <> ''
      AND kind = ANY (%s)
    GROUP BY queue, task_path, kind, place) AS summed
GROUP BY queue, task_path, kind
"""

# Deletes some of the rows that are too old. Two workers may do so at once: each skips the rows that the other has
# locked.
PRUNE_NUMBERS = """
WITH old AS MATERIALIZED (
    SELECT id FROM {number}
    WHERE seconds = %s AND started_at < clock_timestamp() - make_interval(secs => %s)
    ORDER BY started_at LIMIT %s FOR UPDATE SKIP LOCKED
)
DELETE FROM {number} WHERE id = ANY (ARRAY(SELECT id FROM old))
RETURNING id
"""

# Begins a count of the depths if the last one is older than some seconds, or of a time to come, after a step of the
# clock. Of several sessions one gets a row. The others wait for it until it has written the depths. The last count may
# have begun while this statement waited, so it is compared with the clock as it is after the wait.
BEGIN_DEPTHS = """
INSERT INTO {number} AS last (seconds, started_at, kind, queue, task_path, count, total, buckets)
VALUES (0, to_timestamp(0), 'counted', '', '', 0, date_part('epoch', clock_timestamp()), '{{}}')
ON CONFLICT (seconds, task_path, queue, started_at, kind) DO UPDATE SET total = EXCLUDED.total
WHERE last.total NOT BETWEEN EXCLUDED.total - %s AND date_part('epoch', clock_timestamp())
RETURNING total
"""

# Replaces the depths of this minute.
WRITE_DEPTHS = """
WITH found AS MATERIALIZED (
    SELECT * FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::float8[]) AS each (kind, queue, count, total)
), minute AS MATERIALIZED (SELECT to_timestamp(%s) AS started_at), gone AS (
    DELETE FROM {number} AS number USING minute
    WHERE number.seconds = 60 AND number.started_at = minute.started_at AND number.kind = ANY (%s)
      AND NOT EXISTS (SELECT FROM found WHERE found.kind = number.kind AND found.queue = number.queue)
)
INSERT INTO {number} AS number (seconds, started_at, kind, queue, task_path, count, total, buckets)
SELECT 60, minute.started_at, found.kind, found.queue, '', found.count, found.total, '{{}}' FROM found, minute
ON CONFLICT (seconds, task_path, queue, started_at, kind) DO UPDATE SET count = EXCLUDED.count, total = EXCLUDED.total
"""

# The depths of the last count.
READ_DEPTHS = """
SELECT number.queue, number.kind, number.count, number.total FROM {number} AS number
WHERE number.seconds = 60 AND number.kind = ANY (%s) AND number.started_at = (
    SELECT to_timestamp(floor(last.total / 60) * 60) FROM {number} AS last
    WHERE last.seconds = 0 AND last.task_path = '' AND last.queue = '' AND last.started_at = to_timestamp(0)
      AND last.kind = 'counted')
ORDER BY number.queue
"""

# The queues of which attempts are counted: one index probe for each.
QUEUES_OF_ATTEMPTS = """
WITH RECURSIVE found AS (
    (SELECT queue FROM {number} WHERE seconds = 3600 AND task_path = '' AND queue > '' ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT queue FROM {number} WHERE seconds = 3600 AND task_path = '' AND queue > found.queue
            ORDER BY queue LIMIT 1)
    FROM found WHERE found.queue IS NOT NULL
)
SELECT queue FROM found WHERE queue IS NOT NULL
"""


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

# Attempts

#: What this process has counted of steps since the settler took it: by queue, function and kind.
_of_steps: Counter[tuple[str, str, str]] = Counter()
_counting = threading.Lock()


def count_step(queue: str, task_path: str, kind: str, number: int = 1) -> None:
    """Count a recorded step, or a wait that ended by its timeout. The settler writes it, with the next attempts."""
    with _counting:
        _of_steps[queue, task_path, kind] += number


def take_counted_steps() -> dict[tuple[str, str, str], int]:
    """Return what was counted of steps since the last call, by queue, function and kind."""
    with _counting:
        found = dict(_of_steps)
        _of_steps.clear()
    return found


def add_numbers(using: str, counted: Counted) -> float:
    """Add the counts of some minutes to the rows of these minutes, of their hours, of all time, and of the sums.

    Returns the database's time in seconds since the epoch. Sends one message. Raises ``OperationalError`` if the table
    or a row stays locked for longer than a second.
    """
    # Every worker writes the rows in this order, so two workers cannot deadlock. The rows that all workers share are
    # the last ones.
    rows = sorted(_rows(counted), reverse=True)
    columns = list(map(list, zip(*rows, strict=True)))
    # A statement takes the lock of the table before it can set a limit. So a statement before it sets the limit.
    [(seconds,)] = run(using, CLOCK, first=[(LIMIT_WAITS, [LONGEST_WAIT]), (ADD_NUMBERS, columns)])
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
        add_numbers(using, counted)


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
    minutes.
    """
    seconds = int(step.total_seconds() if isinstance(step, timedelta) else step)
    if seconds < MINUTE or seconds % MINUTE:
        raise ValueError(f"step is {step!r}; give a whole number of minutes, in seconds.")
    first, end = _floor(since, seconds), until.timestamp()
    points = {start: Counts() for start in range(first, math.ceil(end), seconds)}
    period = MINUTE if seconds % HOUR else HOUR
    for started, *row in _rows_of(using, period, queue, task_path, (first, end)):
        points[int(started) // seconds * seconds].add_row(*row)
    return [Point(cast("datetime", date_of(started)), counts) for started, counts in points.items()]


def totals(using: str, since: datetime, until: datetime) -> list[Total]:
    """Return the attempts that ended between two moments, by queue and function; most attempts first.

    Up to three hours are read from the minutes, longer times from the hours. The minutes or hours that contain
    ``since`` and ``until`` are counted as a whole.
    """
    period = MINUTE if (until - since).total_seconds() <= 3 * HOUR else HOUR
    span = (_date(_floor(since, period)), _date(until.timestamp()))
    found = _by_function(run(using, TOTALS, period, *span, [*ATTEMPT_KINDS]))
    return sorted(found, key=lambda total: (-total.counts.attempts, total.queue, total.task_path))


def counters(using: str) -> list[Total]:
    """Return all attempts since the tables were made, by queue and function. These numbers only grow."""
    found = _by_function(run(using, TOTALS, EVER, _date(0), _date(1), [*ATTEMPT_KINDS]))
    return sorted(found, key=lambda total: (total.task_path, total.queue))


def finished_per_minute(using: str, queues: Collection[str]) -> dict[str, float]:
    """Return how many tasks of these queues finished in a minute: the average of the last minutes that are written.

    A queue without attempts in these minutes is left out.
    """
    last = now() - WRITTEN_AFTER
    rows = rows_of("Number", using).filter(seconds=MINUTE, task_path=ALL, queue__in=queues)
    rows = rows.filter(started_at__gt=last - timedelta(minutes=RATE_MINUTES), started_at__lte=last)
    # As ``Counts.finished``.
    rows = rows.filter(kind__in=("succeeded", "failed", "cancelled"))
    return {queue: count / RATE_MINUTES for queue, count in rows.values_list("queue").annotate(finished=Sum("count"))}


def clock(using: str) -> float:
    """Return the database's time in seconds since the epoch."""
    [(seconds,)] = run(using, CLOCK)
    return float(seconds)


def prune_numbers(using: str, *, batch: int = WINDOW) -> int:
    """Delete old rows, at most ``batch`` rows of minutes and ``batch`` rows of hours. Returns how many."""
    return sum(len(run(using, PRUNE_NUMBERS, seconds, float(age), batch)) for seconds, age in KEPT.items())


# Depths


def depths(using: str, *, max_age: float = MAX_AGE) -> list[QueueCounts]:
    """Return the counts of each queue that has unfinished or failed tasks or is paused; ``max_age`` is in seconds.

    If nobody has counted for so long, count now. The counts stop at the limits of ``queue_counts``.
    """
    count_depths(using, max_age)
    found: dict[str, dict[str, int]] = {}
    oldest: dict[str, float] = {}
    for queue, status, count, age in run(using, READ_DEPTHS, [*COUNTED]):
        found.setdefault(queue, dict.fromkeys(COUNTED, 0))[status] = count
        if status == "READY":
            oldest[queue] = age
    paused = paused_queues(using)
    for queue in paused:
        found.setdefault(queue, dict.fromkeys(COUNTED, 0))
    return [QueueCounts.of(queue, found[queue], oldest.get(queue), paused.get(queue)) for queue in sorted(found)]


def suspended(using: str) -> list[tuple[str, str, int]]:
    """Return queue, kind and number of the suspended tasks, as last counted; ``depths`` counts."""
    return [(queue, kind, count) for queue, kind, count, _age in run(using, READ_DEPTHS, [*SUSPENDED])]


def queues_without_row(using: str, *, also: Iterable[str] = ()) -> list[str]:
    """Return the queues that have or had tasks, and those of ``also``, without the queues that have a row.

    A queue has a row once it has been paused. A queue is missing if it is newer than the last count.
    """
    attempted = {queue for (queue,) in run(using, QUEUES_OF_ATTEMPTS)}
    known = {each.queue for each in depths(using)} | attempted | {*also}
    return sorted(known - {*rows_of("Queue", using).values_list("pk", flat=True)})


def count_depths(using: str, max_age: float = BETWEEN_DEPTHS) -> float:
    """Count the depths of all queues and write them, unless this was done within ``max_age`` seconds.

    Returns the seconds that it took.
    """
    began = time.monotonic()
    # To the end of the transaction no other session counts.
    with transaction.atomic(using=using):
        for (moment,) in run(using, BEGIN_DEPTHS, max_age):
            minute = moment // MINUTE * MINUTE
            rows = [
                (status, each.queue, count, (each.oldest_ready or 0.0) if status == "READY" else 0.0)
                for each in queue_counts(using)
                for status, count in each.counts.items()
                if count
            ]
            rows += [(kind, queue, count, 0.0) for queue, kind, count in suspended_counts(using)]
            columns = map(list, zip(*rows, strict=True)) if rows else [[], [], [], []]
            run(using, WRITE_DEPTHS, *columns, minute, [*COUNTED, *SUSPENDED])
    return time.monotonic() - began


def _rows(counted: Counted) -> Iterator[tuple[int, str, str, float, str, int, float, str]]:
    """Yield the rows to add to: period, function, queue, start, kind, count, sum and buckets."""
    summed: dict[tuple[int, str, str, float], Counts] = {}
    for (minute, queue, path), counts in counted.items():
        for seconds in KEPT:
            for names in ((path, queue), (ALL, queue), (ALL, ALL)):
                summed.setdefault((seconds, *names, minute // seconds * seconds), Counts()).add(counts)
        summed.setdefault((EVER, path, queue, 0), Counts()).add(counts)
    for key, counts in summed.items():
        yield from ((*key, kind, count, total, _array(buckets)) for kind, count, total, buckets in counts.rows())


def _rows_of(
    using: str, period: int, queue: str | None, task_path: str | None, span: tuple[float, float]
) -> list[tuple[Any, ...]]:
    dates = map(_date, span)
    if task_path is not None and queue is None:
        return run(using, SERIES_OF_FUNCTION, period, task_path, *dates, [*ATTEMPT_KINDS])
    return run(using, SERIES, period, task_path or ALL, queue or ALL, *dates, [*ATTEMPT_KINDS])


def _by_function(rows: Iterable[tuple[Any, ...]]) -> list[Total]:
    """Return the totals of the rows of ``TOTALS``."""
    found: dict[tuple[str, str], Counts] = {}
    for queue, path, kind, (total, *counts) in rows:
        count, *buckets = map(int, counts)
        found.setdefault((queue, path), Counts()).add_row(kind, count, total, buckets)
    return [Total(queue, path, counts) for (queue, path), counts in found.items()]


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
