"""Token buckets of ``rate=``: whose next token has come, and which buckets are not needed any more."""

from __future__ import annotations

from django_pglock.store.sql import run, run_by_index

#: Keys that one statement returns, and keys that one statement reads to delete some.
KEYS_AT_ONCE, READ_AT_ONCE = 1000, 5000

# Keys whose bucket has a token while tasks wait for one. ``opens_at`` is cleared. If tasks still wait, admission sets
# it again.
OPEN_RATES = """
UPDATE {rate_limit} SET opens_at = NULL
WHERE key IN (SELECT key FROM {rate_limit} WHERE opens_at <= clock_timestamp() ORDER BY opens_at LIMIT %s
              FOR UPDATE SKIP LOCKED)
RETURNING key
"""

# Buckets that have been full for a day and for which no task waits, among the next keys behind one: no index has the
# dates, and a million keys that are in use would be read each minute. A bucket without a row is full as well.
FORGET_RATES = """
WITH next AS MATERIALIZED (
    SELECT key, opens_at IS NULL AND arrives_at < clock_timestamp() - interval '1 day' AS is_unused
    FROM {rate_limit} WHERE key > %s ORDER BY key LIMIT %s
), forgotten AS (
    DELETE FROM {rate_limit} WHERE key = ANY (ARRAY(
        SELECT key FROM {rate_limit}
        WHERE key = ANY (ARRAY(SELECT key FROM next WHERE is_unused))
          AND opens_at IS NULL AND arrives_at < clock_timestamp() - interval '1 day' FOR UPDATE SKIP LOCKED))
    RETURNING key
)
SELECT (SELECT count(*) FROM forgotten), count(*), max(key) FROM next
"""


def open_rates(using: str, *, limit: int = KEYS_AT_ONCE) -> list[str]:
    """Return keys whose next token has come, ``limit`` at most. The caller has to admit to them."""
    return [key for (key,) in run(using, OPEN_RATES, limit)]


def delete_unused_rates(using: str, after: str) -> tuple[int, str]:
    """Delete buckets that nobody has used for a day, among the next ``READ_AT_ONCE`` keys behind ``after``.

    Returns how many were deleted, and the key behind which to continue: empty when the walk has ended.
    """
    [(deleted, read, last)] = run_by_index(using, FORGET_RATES, after, READ_AT_ONCE)
    return deleted, last if read == READ_AT_ONCE else ""
