"""How many tasks are in each queue, and what fails, counted by one worker for all.

Any number of workers may be asked for metrics. Each asks for the counts here: if it is time to count again, exactly one
of those that ask at that moment counts, and writes what it found where the others read it. While nobody asks, workers
count less often, for the pages of the admin.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime

from django.db import transaction

from django_pglock.store.count import queue_counts
from django_pglock.store.failures import failures
from django_pglock.store.shared_failures import as_json
from django_pglock.store.sql import run

#: Seconds between two counts, at least and at most, and how many times as long as a count took until the next one.
BETWEEN_COUNTS, LONGEST_BETWEEN_COUNTS, PAUSE_FACTOR = 10.0, 40.0, 20
#: Seconds that may pass beyond these while nobody asks.
UNASKED = 15.0
#: Seconds after which counts are too old for metrics: then nobody has counted, or nobody could.
TOO_OLD = 60.0

# Takes the turn to count, if it is time to. Of several sessions one gets a row: the others wait for its row lock, which
# is held for this statement only, and then find the later date. If that worker dies, another one's turn comes with it.
# The date that is returned is the name of the turn.
TAKE_TURN = """
INSERT INTO {queue_count} AS turn
    (queue, counted_at, count_again_at, ready, blocked, scheduled, running, failed, is_paused)
VALUES ('', clock_timestamp(), clock_timestamp() + make_interval(secs => %s), 0, 0, 0, 0, 0, false)
ON CONFLICT (queue) DO UPDATE SET count_again_at = EXCLUDED.count_again_at
WHERE turn.count_again_at <= clock_timestamp() - make_interval(secs => %s)
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

# Queues in which nothing is any more.
FORGET_COUNTS = "DELETE FROM {queue_count} WHERE queue <> '' AND queue <> ALL (%s::text[])"

# If somebody has changed failed tasks since the turn began, the date is another one, and the failures are not shown.
END_TURN = """
UPDATE {queue_count}
SET counted_at = clock_timestamp(), count_again_at = clock_timestamp() + make_interval(secs => %s),
    failures = CASE WHEN count_again_at = %s THEN %s::jsonb END
WHERE queue = ''
"""

# Nothing, unless somebody has counted lately.
READ_COUNTS = """
SELECT queue, ready, blocked, scheduled, running, failed, oldest_ready, is_paused FROM {queue_count}
WHERE queue <> '' AND counted_at > clock_timestamp() - make_interval(secs => %s)
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
    """Return what is in each queue, as somebody has counted in the last minute; count if it is time to."""
    _count_if_due(using, 0.0)
    return [SharedCount(*row) for row in run(using, READ_COUNTS, TOO_OLD)]


def keep_counts(using: str) -> None:
    """Count if nobody has counted for a while, so that the pages of the admin need not count."""
    _count_if_due(using, UNASKED)


def _count_if_due(using: str, overdue: float) -> None:
    for (turn,) in run(using, TAKE_TURN, LONGEST_BETWEEN_COUNTS, overdue):
        # One transaction, because there is one commit then.
        with transaction.atomic(using=using):
            _count(using, turn)


def _count(using: str, turn: datetime) -> None:
    began = time.monotonic()
    found, failed = queue_counts(using), as_json(failures(using))
    took = time.monotonic() - began
    names = ("READY", "BLOCKED", "SCHEDULED", "RUNNING", "FAILED")
    queues = [each.queue for each in found]
    columns = [[each.counts[name] for each in found] for name in names]
    run(using, FORGET_COUNTS, queues)
    run(
        using,
        WRITE_COUNTS,
        queues,
        *columns,
        [each.oldest_ready for each in found],
        [each.paused_at is not None for each in found],
    )
    run(using, END_TURN, max(BETWEEN_COUNTS, min(LONGEST_BETWEEN_COUNTS, PAUSE_FACTOR * took)), turn, failed)
