"""Token buckets of ``rate=``: whose next token has come, and which buckets are not needed any more."""

from __future__ import annotations

from django_pglock.store.sql import run

#: Keys that one statement returns or deletes.
KEYS_AT_ONCE = 1000

# Keys whose bucket has a token while tasks wait for one. ``opens_at`` is cleared. If tasks still wait, admission sets
# it again.
OPEN_RATES = """
UPDATE {rate_limit} SET opens_at = NULL
WHERE key IN (SELECT key FROM {rate_limit} WHERE opens_at <= clock_timestamp() ORDER BY opens_at LIMIT %s
              FOR UPDATE SKIP LOCKED)
RETURNING key
"""

# Buckets that have been full for a day and for which no task waits. A bucket without a row is full as well.
FORGET_RATES = """
DELETE FROM {rate_limit} WHERE key = ANY (ARRAY(
    SELECT key FROM {rate_limit}
    WHERE opens_at IS NULL AND arrives_at < clock_timestamp() - interval '1 day' LIMIT %s FOR UPDATE SKIP LOCKED))
RETURNING key
"""


def open_rates(using: str, *, limit: int = KEYS_AT_ONCE) -> list[str]:
    """Return keys whose next token has come, ``limit`` at most. The caller has to admit to them."""
    return [key for (key,) in run(using, OPEN_RATES, limit)]


def forget_rates(using: str, *, limit: int = KEYS_AT_ONCE) -> int:
    """Delete buckets of keys that nobody has used for a day, ``limit`` at most. Returns how many."""
    return len(run(using, FORGET_RATES, limit))
