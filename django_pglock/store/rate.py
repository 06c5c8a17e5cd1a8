"""Token buckets of ``rate=``: finds the keys whose next token is due, and deletes buckets that are not needed."""

from __future__ import annotations

from django_pglock.store.statements import run, run_by_index

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


def open_rates(using: str, *, limit: int = KEYS_AT_ONCE) -> list[str]:
    """Return up to ``limit`` keys whose next token is due. The caller must admit to them."""
    return [key for (key,) in run(using, OPEN_RATES, limit)]


def delete_unused_rates(using: str, after: str) -> tuple[int, str]:
    """Delete buckets that were not used for a day, among the next ``READ_AT_ONCE`` keys behind ``after``.

    Returns how many were deleted, and the key behind which to continue: empty at the end of the table.
    """
    [(deleted, read, last)] = run_by_index(using, DELETE_UNUSED_RATES, after, READ_AT_ONCE)
    return deleted, last if read == READ_AT_ONCE else ""
