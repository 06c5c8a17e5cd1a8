"""The token buckets of ``rate=``: each task takes a token from the bucket of its key before it may run.

A task with a rate is BLOCKED until it gets a token, and READY afterwards. So tasks take tokens when they are admitted,
while the key is locked. A bucket is one row, by the generic cell rate algorithm. The ``interval`` of a ``Rate`` is the
number of seconds from one token to the next, and its ``portion`` is the number of tokens in a full bucket:

- ``arrives_at`` is the date at which the bucket will be full. A date in the past, or no row: the bucket is full.
- A token is in the bucket if ``arrives_at`` is at most ``portion - 1`` intervals from now.
- A task that takes a token moves ``arrives_at`` by one interval, from now if the bucket was full.
- ``opens_at`` is the date of the next token for which tasks wait. Upkeep admits to the key at this date.

Tokens are taken at two places: enqueue.py takes one token for one call, and ``ADMIT`` of admit.py takes several
tokens for the tasks that wait, and sets ``opens_at``. The bucket may have refilled while its tasks were READY.
``START_AT_RATE`` takes this back when they are claimed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from django_pglock.store.admit import locking
from django_pglock.store.statements import IN_INDEX_ORDER, run, windows

if TYPE_CHECKING:
    from django_pglock.tasks.claim import Claim

#: The largest number of keys that one statement returns, and that one statement reads to delete unused buckets.
KEYS_AT_ONCE, READ_AT_ONCE = 1000, 5000

# Returns keys whose bucket has a token for which tasks wait, and clears ``opens_at``. If tasks still wait afterwards,
# admission sets it again.
OPEN_RATES = """
UPDATE {rate_limit} SET opens_at = NULL
WHERE key = ANY (ARRAY(SELECT key FROM {rate_limit} WHERE opens_at <= clock_timestamp() ORDER BY opens_at LIMIT %s
                       FOR UPDATE SKIP LOCKED))
RETURNING key
"""

# Tasks of these keys start now. They took their tokens when they were admitted. If no worker has claimed them for some
# time, the bucket has refilled behind them, and as many tasks again would start at once. So the bucket is as empty as
# if their tokens, and those of the tasks that are still READY, were taken now.
START_AT_RATE = """
WITH start AS MATERIALIZED (
    SELECT each.key, clock_timestamp() + make_interval(secs => (each.count + still.ready) * each.interval) AS full_at
    FROM ROWS FROM (unnest(%s::text[]), unnest(%s::float8[]), unnest(%s::int[]), unnest(%s::int[]))
         AS each (key, interval, burst, count)
    CROSS JOIN LATERAL (SELECT count(*) AS ready FROM (
        SELECT FROM {task} AS task
        WHERE (task.lock_key, task.status) BETWEEN (each.key, 'READY') AND (each.key, 'READY')
          AND task.lock_key IS NOT NULL AND task.finished_at IS NULL
        ORDER BY task.lock_key, task.status, task.id LIMIT each.burst) AS waiting) AS still
)
UPDATE {rate_limit} AS bucket SET arrives_at = start.full_at
FROM start
WHERE bucket.key = start.key AND bucket.key = ANY (ARRAY(SELECT key FROM start)) AND bucket.arrives_at < start.full_at
RETURNING bucket.key
"""

# Deletes buckets that have been full for a day and for which no task waits, among the next keys behind one key. No
# index has the dates, so one statement reads a limited number of keys. Otherwise a million keys in use would be read
# each minute. A bucket without a row counts as full.
DELETE_UNUSED_RATES = """
WITH next AS MATERIALIZED (
    SELECT key, opens_at IS NULL AND arrives_at < clock_timestamp() - interval '1 day' AS is_unused
    FROM {rate_limit} WHERE key > %s ORDER BY key LIMIT %s
), deleted AS (
    DELETE FROM {rate_limit} WHERE key = ANY (ARRAY(
        SELECT key FROM {rate_limit}
        WHERE key = ANY (ARRAY(SELECT key FROM next WHERE is_unused))
          AND opens_at IS NULL AND arrives_at < clock_timestamp() - interval '1 day' FOR UPDATE SKIP LOCKED))
    RETURNING key
)
SELECT (SELECT count(*) FROM deleted), count(*), max(key) FROM next
"""


def note_starts(using: str, claims: Iterable[Claim]) -> None:
    """Empty the buckets of the claims that have a rate, as if their tokens were taken now."""
    rated = ((each.lock_key, json.loads(each.meta).get("rate")) for each in claims if '"rate"' in each.meta)
    # Any program may write rows.
    rates = [(key, *rate) for key, rate in rated if key and isinstance(rate, list) and len(rate) == 2]
    for some in windows(sorted(Counter(rates).items()), KEYS_AT_ONCE):
        keys, intervals, bursts = map(list, zip(*(each for each, _ in some), strict=True))
        counts = [count for _, count in some]
        run(using, START_AT_RATE, keys, intervals, bursts, counts, first=locking(using, keys))


def open_rates(using: str, *, limit: int = KEYS_AT_ONCE) -> list[str]:
    """Return up to ``limit`` keys whose next token is due. The caller must admit to them."""
    return [key for (key,) in run(using, OPEN_RATES, limit, first=IN_INDEX_ORDER)]


def delete_unused_rates(using: str, after: str) -> tuple[int, str]:
    """Delete buckets that were not used for a day, among the next ``READ_AT_ONCE`` keys behind ``after``.

    Returns how many were deleted, and the key behind which to continue: empty at the end of the table.
    """
    [(deleted, read, last)] = run(using, DELETE_UNUSED_RATES, after, READ_AT_ONCE, first=IN_INDEX_ORDER)
    return deleted, last if read == READ_AT_ONCE else ""
