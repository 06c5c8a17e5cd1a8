"""The number of tasks in each queue, and the groups of failures, counted by one worker for all workers.

Metrics may be requested from any number of workers. Each of them calls ``shared_counts``. If a new count is due,
exactly one of these workers counts, and writes the result into a table that the others read. While no metrics are
requested, workers count less often, for the pages of the admin.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime

from django.db import transaction

from django_pglock.store.count import queue_counts
from django_pglock.store.failures import failures
from django_pglock.store.liveness import is_recent
from django_pglock.store.shared_failures import as_json
from django_pglock.store.statements import run

#: The least and the most seconds between two counts. In between, the pause is the duration of a count times the third
#: number.
BETWEEN_COUNTS, LONGEST_BETWEEN_COUNTS, PAUSE_FACTOR = 10.0, 40.0, 20
#: While no metrics are requested, a count may be overdue for this number of seconds.
OVERDUE_WITHOUT_REQUEST = 15.0
#: Seconds after which counts are too old for metrics: no worker has counted, or none was able to.
MAX_AGE_FOR_METRICS = 60.0

# Begins a count, if one is due. Of several sessions only one gets a row. The others wait for the row lock, which is
# held for this statement only, and then find the later date. If the worker that counts dies, another one counts at that
# date. The returned date identifies the count. A date that is later than any that
# a count writes was written before the clock was put back.
BEGIN_COUNT = """
INSERT INTO {queue_count} AS last
    (queue, counted_at, count_again_at, ready, blocked, scheduled, running, failed, is_paused)
VALUES ('', clock_timestamp(), clock_timestamp() + make_interval(secs => %s), 0, 0, 0, 0, 0, false)
ON CONFLICT (queue) DO UPDATE SET count_again_at = EXCLUDED.count_again_at
WHERE last.count_again_at <= clock_timestamp() - make_interval(secs => %s)
   OR last.count_again_at > EXCLUDED.count_again_at + interval '1 minute'
RETURNING count_again_at
"""

WRITE_COUNTS = """
INSERT INTO {queue_count}
    (queue, counted_at, ready, blocked, scheduled, running, failed, oldest_ready, is_paused)
SELECT each.queue, clock_timestamp(), each.ready, each.blocked, each.scheduled, each.running, each.failed, each.oldest,
       each.is_paused
FROM unnest(%s::text[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::bigint[], %s::float8[], %s::bool[])
    AS each (queue, ready, blocked, scheduled, running, failed, oldest, is_paused)
ON CONFLICT (queue) DO UPDATE SET
    counted_at = EXCLUDED.counted_at, ready = EXCLUDED.ready, blocked = EXCLUDED.blocked,
    scheduled = EXCLUDED.scheduled, running = EXCLUDED.running, failed = EXCLUDED.failed,
    oldest_ready = EXCLUDED.oldest_ready, is_paused = EXCLUDED.is_paused
"""

# Deletes the counts of queues that no longer have tasks.
DELETE_COUNTS = "DELETE FROM {queue_count} WHERE queue <> '' AND queue <> ALL (%s::text[])"

# Ends a count. If failed tasks were changed since the count began, the row has another date, and the failures are not
# stored.
END_COUNT = """
UPDATE {queue_count}
SET counted_at = clock_timestamp(), count_again_at = clock_timestamp() + make_interval(secs => %s),
    failures = CASE WHEN count_again_at = %s THEN %s::jsonb END
WHERE queue = ''
"""

# The counts; no row if they are too old.
READ_COUNTS = f"""
SELECT queue, ready, blocked, scheduled, running, failed, oldest_ready, is_paused FROM {{queue_count}}
WHERE queue <> '' AND {is_recent("counted_at")}
"""


@dataclass(frozen=True, slots=True)
class SharedCount:
    """The tasks of one queue by status, counted as ``queue_counts`` does, and the age of the oldest ready one."""

    queue: str
    ready: int
    blocked: int
    scheduled: int
    running: int
    failed: int
    oldest_ready: float | None
    is_paused: bool


def shared_counts(using: str) -> list[SharedCount]:
    """Return the counts of each queue, at most a minute old. Count first if a count is due."""
    _count_if_due(using, 0.0)
    return [SharedCount(*row) for row in run(using, READ_COUNTS, MAX_AGE_FOR_METRICS)]


def keep_counts(using: str) -> None:
    """Count if a count is long overdue, so that the pages of the admin need not count."""
    _count_if_due(using, OVERDUE_WITHOUT_REQUEST)


def _count_if_due(using: str, overdue: float) -> None:
    for (count_id,) in run(using, BEGIN_COUNT, LONGEST_BETWEEN_COUNTS, overdue):
        # One transaction, so that there is only one commit.
        with transaction.atomic(using=using):
            _count(using, count_id)


def _count(using: str, count_id: datetime) -> None:
    began = time.monotonic()
    found, failed = queue_counts(using), as_json(failures(using))
    took = time.monotonic() - began
    names = ("READY", "BLOCKED", "SCHEDULED", "RUNNING", "FAILED")
    queues = [each.queue for each in found]
    columns = [[each.counts[name] for each in found] for name in names]
    run(using, DELETE_COUNTS, queues)
    run(
        using,
        WRITE_COUNTS,
        queues,
        *columns,
        [each.oldest_ready for each in found],
        [each.paused_at is not None for each in found],
    )
    run(using, END_COUNT, max(BETWEEN_COUNTS, min(LONGEST_BETWEEN_COUNTS, PAUSE_FACTOR * took)), count_id, failed)
