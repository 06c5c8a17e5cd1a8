"""The token buckets of ``rate=``: each task takes a token from the bucket of its key before it may run.

A task with a rate is BLOCKED until it gets a token, and READY afterwards. So tasks take tokens when they are admitted,
while the key is locked. A bucket is one row, by the generic cell rate algorithm. The ``interval`` of a ``Rate`` is the
number of seconds from one token to the next, and its ``portion`` is the number of tokens in a full bucket:

- ``arrives_at`` is the date at which the bucket will be full. A date in the past, or no row: the bucket is full.
- A token is in the bucket if ``arrives_at`` is at most ``portion - 1`` intervals from now.
- A task that takes a token moves ``arrives_at`` by one interval, from now if the bucket was full.
- ``opens_at`` is the date of the next token for which tasks wait. Upkeep admits to the key at this date.

Three statements take tokens. Two of this file take one token for one call: when it is enqueued, or right after the
commit of the transaction that has enqueued it. ``ADMIT`` of admit.py takes several tokens for the tasks that wait, and
sets ``opens_at``. The bucket may have refilled while its tasks were READY. ``START_AT_RATE`` takes this back when
they are claimed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from django_pglock.postgres.connections import connection_for
from django_pglock.store.admit import admit, admit_by, admit_one_by
from django_pglock.store.call import Call, Enqueued
from django_pglock.store.insert_tasks import Row, insert_by
from django_pglock.store.statements import filled, rows_of, run, run_by_index
from django_pglock.store.wake import wake, wake_parents
from django_pglock.tasks.states import TaskStatus

if TYPE_CHECKING:
    from django_pglock.tasks.claim import Claim
    from django_pglock.tasks.fields import TaskFields
    from django_pglock.tasks.options import Rate

#: The largest number of keys that one statement returns, and that one statement reads to delete unused buckets.
KEYS_AT_ONCE, READ_AT_ONCE = 1000, 5000

# One call that is due at once and has a rate. It takes a token from the bucket of its key if the bucket has one, no
# other task waits for a token, and fewer tasks than the burst are READY. If the key is also a lock key, no other task
# of it may be admitted or wait for a retry. The comment at ``ADMIT`` in admit.py says why. BLOCKED tasks are the first
# in this range of the index, so one probe is enough. Also returns whether ``opens_at`` is set for the next token. If it
# is, nothing else has to be done for a BLOCKED task.
AT_RATE = """
WITH token AS (
    INSERT INTO {rate_limit} AS bucket (key, arrives_at)
    SELECT {key}, clock_timestamp() + make_interval(secs => {interval})
    FROM (SELECT task.status FROM {task} AS task
          WHERE (task.lock_key, task.status) BETWEEN ({key}, 'BLOCKED') AND ({key}, '{last}')
            AND task.lock_key IS NOT NULL AND task.finished_at IS NULL
          ORDER BY task.lock_key, task.status, task.id LIMIT {most}) AS ahead
    HAVING count(*) < {most} AND min(ahead.status) IS DISTINCT FROM 'BLOCKED'
    ON CONFLICT (key) DO UPDATE
    SET arrives_at = GREATEST(bucket.arrives_at, clock_timestamp()) + make_interval(secs => {interval}), opens_at = NULL
    WHERE bucket.arrives_at <= clock_timestamp() + make_interval(secs => {tokens})
    RETURNING key
)
{insert}, (SELECT opens_at > clock_timestamp() FROM {rate_limit} WHERE key = {key})
"""

# Admits one task, after the commit of the transaction that has enqueued it, on the conditions of ``AT_RATE``.
# Only the task itself may be BLOCKED, so its range of the index has at most as many rows as may be admitted. No other
# transaction takes a token meanwhile, because this one has locked the key: so the bucket is read first, and the token
# is taken only if the task is still BLOCKED. Each use of the table of tasks costs the planner as much as a small
# statement, so the statement uses this table only twice. Also returns whether ``opens_at`` is set for the next token.
ADMIT_OWN_AT_RATE = """
WITH admitted AS (
    UPDATE {task} AS task SET status = 'READY'
    WHERE task.id = %s AND task.status || '' = 'BLOCKED' AND task.waits_for = 0
      AND (SELECT set_config('lock_timeout', '100ms', true)) <> ''
      AND (SELECT count(*) <= %s AND count(*) FILTER (WHERE here.status = 'BLOCKED') = 1
           FROM (SELECT task.status FROM {task} AS task
                 WHERE (task.lock_key, task.status) BETWEEN (%s, 'BLOCKED') AND (%s, %s)
                   AND task.lock_key IS NOT NULL AND task.finished_at IS NULL
                 ORDER BY task.lock_key, task.status, task.id LIMIT %s) AS here)
      AND COALESCE((SELECT arrives_at <= clock_timestamp() + make_interval(secs => %s)
                    FROM {rate_limit} WHERE key = %s), true)
    RETURNING task.queue
), token AS (
    INSERT INTO {rate_limit} AS bucket (key, arrives_at)
    SELECT %s, clock_timestamp() + make_interval(secs => %s) FROM admitted
    ON CONFLICT (key) DO UPDATE
    SET arrives_at = GREATEST(bucket.arrives_at, clock_timestamp()) + make_interval(secs => %s), opens_at = NULL
)
SELECT (SELECT queue FROM admitted),
       (SELECT opens_at > clock_timestamp() FROM {rate_limit} WHERE key = %s)
"""

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


def insert_at_rate(using: str, task: TaskFields, call: Call, meta: str) -> tuple[Enqueued, bool]:
    """Write one call with a rate. If it also has a lock key, no other task of this key may run at the same time.

    Also returns whether the call waits for a token whose date is set. Then nothing else has to be done.
    """
    enqueued, is_token_scheduled = insert_by(using, call.lock, at_rate(using, task, call, meta))
    return enqueued, enqueued.status == TaskStatus.BLOCKED and is_token_scheduled is True


def at_rate(using: str, task: TaskFields, call: Call, meta: str) -> str:
    """Return ``AT_RATE`` for a call."""
    assert task.rate is not None  # noqa: S101 - for the type checker
    connection = connection_for(using)
    connection.ensure_connection()
    row = Row(connection, task, call, meta, blocked_if="NOT EXISTS (SELECT FROM token)")
    most, last = capacity_at_rate(task.rate, is_alone=task.lock is not None)
    return AT_RATE.format(
        task=filled("{task}"),
        rate_limit=filled("{rate_limit}"),
        insert=row.insert,
        key=row.columns["lock_key"],
        interval=repr(task.rate.interval),
        tokens=repr((task.rate.portion - 1) * task.rate.interval),
        most=most,
        last=last,
    )


def admit_own_at_rate(using: str, id_: int, key: str, rate: Rate, queue: str, *, is_alone: bool) -> None:
    """Give the next token of its key to one task with a rate, right after the commit that enqueued it.

    ``queue`` is the queue of the task. ``is_alone``: no other task of the key may run at the same time. The statement
    is cheaper than those of ``admit``, and is enough in most cases.
    """
    interval, (most, last) = rate.interval, capacity_at_rate(rate, is_alone=is_alone)
    tokens = (rate.portion - 1) * interval
    values = (id_, most, key, key, last, most + 1, tokens, key, key, interval, interval, key)
    admitted, is_token_scheduled = admit_one_by(using, ADMIT_OWN_AT_RATE, key, values)
    if admitted is not None:
        wake(using, [queue])
    elif not is_token_scheduled and rows_of("Task", using).filter(pk=id_, status=TaskStatus.BLOCKED).exists():
        admit(using, [key])
        # Admission may have set the date of the next token. A sleeping worker has to read this date.
        wake_parents(using)


def note_starts(using: str, claims: Iterable[Claim]) -> None:
    """Empty the buckets of the claims that have a rate, as if their tokens were taken now."""
    rated = ((each.lock_key, json.loads(each.meta).get("rate")) for each in claims if '"rate"' in each.meta)
    # Any program may write rows.
    rates = [(key, *rate) for key, rate in rated if key and isinstance(rate, list) and len(rate) == 2]
    started = sorted(Counter(rates).items())
    for start in range(0, len(started), KEYS_AT_ONCE):
        some = started[start : start + KEYS_AT_ONCE]
        keys, intervals, bursts = zip(*(each for each, _ in some), strict=True)
        counts = [count for _, count in some]
        admit_by(using, [*keys], (START_AT_RATE, ([*keys], [*intervals], [*bursts], counts)))


def capacity_at_rate(rate: Rate, *, is_alone: bool) -> tuple[int, str]:
    """Return how many tasks of a key with a rate may be admitted, and the last status in which a task counts.

    Tasks of a lock key that admits one task at a time count until they have ended. All other tasks count until they
    run.
    """
    return (1, TaskStatus.SCHEDULED.value) if is_alone else (rate.portion, TaskStatus.READY.value)


def open_rates(using: str, *, limit: int = KEYS_AT_ONCE) -> list[str]:
    """Return up to ``limit`` keys whose next token is due. The caller must admit to them."""
    return [key for (key,) in run(using, OPEN_RATES, limit)]


def delete_unused_rates(using: str, after: str) -> tuple[int, str]:
    """Delete buckets that were not used for a day, among the next ``READ_AT_ONCE`` keys behind ``after``.

    Returns how many were deleted, and the key behind which to continue: empty at the end of the table.
    """
    [(deleted, read, last)] = run_by_index(using, DELETE_UNUSED_RATES, after, READ_AT_ONCE)
    return deleted, last if read == READ_AT_ONCE else ""
