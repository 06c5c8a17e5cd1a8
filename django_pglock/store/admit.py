"""Admission: which tasks with a lock key may run.

A task with a lock key is BLOCKED until it is *admitted*. Admission makes the task READY, so that any worker can claim
it. So claims do not read lock keys, and a hundred thousand tasks that wait for one key slow down no other task.

Admission follows two events: a task with the key is enqueued, or a task with the key ends. Each event is committed
before admission reads the key. Only one transaction at a time admits to a key. So of two admissions, the later one sees
what the earlier one has committed. If a process crashes between its commit and its admission, upkeep admits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from django.db import connections

from django_pglock.keys.reserved import ADMISSION
from django_pglock.store.statements import IN_INDEX_ORDER, Part, array_of_texts, run, windows
from django_pglock.store.wake import after_commit, wake
from django_pglock.tasks.call_keys import GROUPED, RATED

#: The number of keys that one transaction admits tasks to.
KEYS_AT_ONCE = 1000

# The prefixes as they are written in a statement with parameters.
_GROUPED, _RATED = GROUPED.replace("%", "%%"), RATED.replace("%", "%%")

# The number of a key: 32 bits of its SHA-256.
_NUMBER = "('x' || encode(substr(sha256(convert_to(%s, 'UTF8')), 1, 4), 'hex'))::bit(32)::int"

# The first of two statements of one message: only one transaction at a time admits to a key. The message is a
# transaction of its own, so the second statement sees what the previous transaction has committed. The locks are taken
# in the order of their numbers, not of the keys. Otherwise transactions could deadlock, because two keys may have the
# same number.
LOCK_KEYS = f"""
SELECT pg_advisory_xact_lock({ADMISSION}, number), {{by_index}}
FROM (SELECT DISTINCT {_NUMBER % "key"} AS number FROM unnest(%s::text[]) AS key ORDER BY number) AS keys
"""

# The same for one key, in half the time.
LOCK_KEY = f"SELECT pg_advisory_xact_lock({ADMISSION}, {_NUMBER}), {{by_index}}"

# The tasks that keep a key although they are not admitted: they have begun, and are scheduled to continue, or wait for
# their children (children.py). The condition is that of an index, which contains only few tasks.
_KEEPERS = """SELECT task.id FROM {{task}} AS task
    WHERE task.lock_key BETWEEN {key} AND {key}
      AND (task.status = 'SCHEDULED' AND task.started_at IS NOT NULL
           OR task.status = 'BLOCKED' AND task.worker IS NOT NULL)
    ORDER BY task.lock_key"""

# Admits the first waiting task of each of these keys if no task of the key is admitted. Most keys admit one task at a
# time, and need nothing else. The server plans this statement in a fifth of the time that it needs for ``ADMIT``. The
# statement returns the keys that need ``ADMIT``: keys whose first task may run beside others, has a rate, or waits for
# other tasks, and keys without an admitted task that have a SCHEDULED task, which may be a retry. And keys whose first
# task had to wait for something else: only then a younger task may have begun, and keep the key while it waits for its
# children. To look for such a task here would take the planner half as long again.
#
# The comments at ``ADMIT`` say why locked rows are skipped, and why keys are compared by ranges.
ADMIT_NEXT = f"""
WITH first AS MATERIALIZED (
    SELECT keys.key, waiting.id, busy.status,
           waiting.waits_for = 0 AND COALESCE(waiting.concurrency, 1) = 1
               AND NOT waiting.meta ?| '{{{{rate,after,after_ended}}}}'
               AND (waiting.run_after IS NULL OR starts_with(keys.key, '{_GROUPED}')) AS is_alone
    FROM unnest(%s::text[]) AS keys (key)
    CROSS JOIN LATERAL (
        SELECT task.id, task.waits_for, task.concurrency, task.meta, task.run_after FROM {{task}} AS task
        WHERE (task.lock_key, task.status) BETWEEN (keys.key, 'BLOCKED') AND (keys.key, 'BLOCKED')
          AND task.lock_key IS NOT NULL AND task.finished_at IS NULL
        ORDER BY task.lock_key, task.status, task.id LIMIT 1) AS waiting
    LEFT JOIN LATERAL (
        SELECT task.status FROM {{task}} AS task
        WHERE (task.lock_key, task.status) BETWEEN (keys.key, 'READY') AND (keys.key, 'SCHEDULED')
          AND task.lock_key IS NOT NULL AND task.finished_at IS NULL
        ORDER BY task.lock_key, task.status, task.id LIMIT 1) AS busy ON true
), locked AS MATERIALIZED (
    SELECT task.id FROM {{task}} AS task
    WHERE task.id = ANY (ARRAY(SELECT id FROM first WHERE is_alone AND status IS NULL))
      AND task.status || '' = 'BLOCKED'
    FOR NO KEY UPDATE SKIP LOCKED
), admitted AS (
    UPDATE {{task}} AS task SET status = 'READY'
    WHERE task.id = ANY (ARRAY(SELECT id FROM locked)) AND task.status || '' = 'BLOCKED'
    RETURNING task.queue
)
SELECT queue, NULL FROM admitted
UNION ALL
SELECT NULL, key FROM first WHERE NOT is_alone OR status = 'SCHEDULED'
"""

# Admits the first waiting tasks of these keys, as many as the capacity of each key allows. A task uses capacity from
# its admission to its end. At a key that admits one task at a time, a task that will be retried uses capacity, too. The
# next tasks wait for the retry, because such a key promises to run its tasks in order. If the functions that share a
# key differ in their concurrency, the smallest concurrency of the running tasks is the limit. At a key with a rate,
# each admitted task takes a token from the bucket (rate.py). READY tasks count against the burst. Otherwise admitted
# tasks would pile up in front of busy workers, and would then run faster than the rate. ``opens_at`` is also set if the
# tasks wait for something else than a token. The longer no task has taken a token, the later ``opens_at`` is.
#
# A token is due some milliseconds before a worker notices it. With a burst of 1, each of these delays moves all later
# tokens: nobody may start more tasks in a time than the rate says. With a larger burst, the bucket makes up for the
# delay by itself. A start that the worker has not written into the bucket yet is in the row of the running task.
#
# A group admits one task at a time, because the run that begins with it takes all others that wait. The next one is
# admitted when the run has taken them. Runs are counted by the tasks that they have begun with. The others have a
# negative concurrency (claim.py).
#
# If all tasks that an older task waits for (``after=``) have ended, but ``RELEASE`` has not recorded this yet, no task
# is admitted before that older task. ``RELEASE`` admits to the key afterwards. Only the first hundred older tasks are
# read.
#
# If another transaction holds a row lock on a blocked task, only tasks with the same lock key wait: the row and the
# tasks behind it stay BLOCKED. The transaction that has changed the row admits after its commit; upkeep does so, too.
#
# The first waiting tasks are selected by a range of the index of keys, in its order. With "=" the planner may choose
# another index, because it expects to find these tasks soon. It would then read all tasks that wait for other keys. The
# waiters of a task are selected in the same way. The UPDATE selects by an array of ids, because the planner expects an
# array to be short. It expects a LIMIT of unknown value to return a tenth of all rows.
#
# A bucket is full after ``burst`` intervals at the latest. If its date is later, the clock was put back since.
#
# The bucket is selected with LIMIT, so that the planner looks up its key. While the statistics know of no buckets, it
# would merge the keys with the whole index of buckets instead.
ADMIT = f"""
WITH head AS MATERIALIZED (
    SELECT first.*, (first.meta -> 'rate' ->> 0)::float8 AS interval, (first.meta -> 'rate' ->> 1)::int AS burst,
           COALESCE(abs(first.concurrency), keys.otherwise) AS most, keys.otherwise
    FROM (SELECT key, CASE WHEN starts_with(key, '{_RATED}') THEN 32767 ELSE 1 END AS otherwise
          FROM unnest(%s::text[]) AS key) AS keys
    CROSS JOIN LATERAL (
        SELECT task.lock_key AS key, task.id, task.concurrency, task.meta FROM {{task}} AS task
        WHERE (task.lock_key, task.status) BETWEEN (keys.key, 'BLOCKED') AND (keys.key, 'BLOCKED')
          AND task.lock_key IS NOT NULL AND task.finished_at IS NULL AND task.waits_for = 0
        ORDER BY task.lock_key, task.status, task.id LIMIT 1) AS first
    WHERE NOT EXISTS (
        SELECT FROM (
            SELECT task.id FROM {{task}} AS task
            WHERE (task.lock_key, task.status) BETWEEN (first.key, 'BLOCKED') AND (first.key, 'BLOCKED')
              AND task.lock_key IS NOT NULL AND task.finished_at IS NULL AND task.id < first.id AND task.waits_for > 0
              AND task.worker IS NULL
            ORDER BY task.lock_key, task.status, task.id LIMIT 100) AS older
        WHERE (SELECT bool_and(awaited.finished_at IS NOT NULL) FROM {{task}} AS awaited
               WHERE awaited.id = ANY (ARRAY(SELECT waiter.awaited FROM {{waiter}} AS waiter
                                             WHERE waiter.task_id BETWEEN older.id AND older.id
                                             ORDER BY waiter.task_id))))
), capacity AS MATERIALIZED (
    SELECT head.key, head.otherwise, head.interval, head.burst, busy.ready, busy.admitted,
           LEAST(head.most, busy.least) - busy.admitted
               - CASE WHEN head.most = 1 AND NOT starts_with(head.key, '{_GROUPED}')
                           AND ({_KEEPERS.format(key="head.key")} LIMIT 1) IS NOT NULL
                      THEN 1 ELSE 0 END AS free_capacity,
           EXTRACT(EPOCH FROM clock_timestamp() - bucket.arrives_at) AS idle,
           bucket.arrives_at AS arrived,
           GREATEST(bucket.arrives_at, busy.last_start + make_interval(secs => head.interval), clock_timestamp())
               AS arrives_at
    FROM head
    LEFT JOIN LATERAL (
        SELECT LEAST(arrives_at, clock_timestamp() + make_interval(secs => head.burst * head.interval)) AS arrives_at
        FROM {{rate_limit}} WHERE key = head.key LIMIT 1) AS bucket ON true
    CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE task.status = 'READY')::int AS ready,
               count(*) FILTER (WHERE COALESCE(task.concurrency, 1) > 0)::int AS admitted,
               min(COALESCE(abs(task.concurrency), head.otherwise)) AS least,
               max(LEAST(task.last_attempted_at, clock_timestamp()))
                   FILTER (WHERE task.status = 'RUNNING') AS last_start
        FROM {{task}} AS task
        WHERE (task.lock_key, task.status) BETWEEN (head.key, 'READY') AND (head.key, 'RUNNING')
          AND task.lock_key IS NOT NULL AND task.finished_at IS NULL) AS busy
), allowed AS MATERIALIZED (
    SELECT capacity.*, GREATEST(0, CASE
               WHEN starts_with(key, '{_GROUPED}') THEN LEAST(free_capacity, 1 - ready)
               WHEN burst IS NULL THEN free_capacity
               ELSE LEAST(free_capacity, burst - ready, floor(
                   burst - EXTRACT(EPOCH FROM arrives_at - clock_timestamp()) / interval + 0.000001)::int)
               END) AS count
    FROM capacity
), next AS MATERIALIZED (
    SELECT first.id, allowed.key FROM allowed CROSS JOIN LATERAL (
        SELECT waiting.id, row_number() OVER earlier AS place,
               min(COALESCE(abs(waiting.concurrency), allowed.otherwise)) OVER earlier AS least
        FROM (SELECT task.lock_key, task.status, task.id, task.concurrency FROM {{task}} AS task
              WHERE (task.lock_key, task.status) BETWEEN (allowed.key, 'BLOCKED') AND (allowed.key, 'BLOCKED')
                AND task.lock_key IS NOT NULL AND task.finished_at IS NULL AND task.waits_for = 0
              ORDER BY task.lock_key, task.status, task.id LIMIT allowed.count) AS waiting
        WINDOW earlier AS (ORDER BY waiting.lock_key, waiting.status, waiting.id ROWS UNBOUNDED PRECEDING)) AS first
    WHERE allowed.admitted + first.place <= first.least
), locked AS MATERIALIZED (
    SELECT task.id FROM {{task}} AS task
    WHERE task.id = ANY (ARRAY(SELECT id FROM next)) AND task.status || '' = 'BLOCKED'
    FOR NO KEY UPDATE SKIP LOCKED
), admitted AS MATERIALIZED (
    SELECT id, key FROM (
        SELECT id, key, bool_and(id IN (SELECT id FROM locked)) OVER (PARTITION BY key ORDER BY id) AS is_free
        FROM next) AS each
    WHERE is_free
), bucket AS (
    INSERT INTO {{rate_limit}} AS bucket (key, arrives_at, opens_at)
    SELECT allowed.key, moment.arrives_at,
           CASE WHEN remaining.more THEN GREATEST(
               moment.arrives_at - make_interval(secs => (burst - 1) * interval),
               clock_timestamp() + make_interval(secs => GREATEST(LEAST(interval, 0.025),
                   CASE WHEN through.taken = 0 THEN LEAST(1, allowed.idle / 10) END))) END
    FROM allowed
    CROSS JOIN LATERAL (SELECT count(*) AS taken FROM admitted WHERE admitted.key = allowed.key) AS through
    CROSS JOIN LATERAL (
        SELECT CASE WHEN through.taken = 0 THEN COALESCE(allowed.arrived, allowed.arrives_at)
                    ELSE allowed.arrives_at + make_interval(secs => through.taken * interval) END AS arrives_at
    ) AS moment
    CROSS JOIN LATERAL (
        SELECT EXISTS (SELECT FROM {{task}} AS task
            WHERE (task.lock_key, task.status) BETWEEN (allowed.key, 'BLOCKED') AND (allowed.key, 'BLOCKED')
              AND task.lock_key IS NOT NULL AND task.finished_at IS NULL AND task.waits_for = 0
            ORDER BY task.lock_key, task.status, task.id OFFSET through.taken) AS more) AS remaining
    WHERE burst IS NOT NULL
    ON CONFLICT (key) DO UPDATE SET arrives_at = EXCLUDED.arrives_at, opens_at = EXCLUDED.opens_at
)
UPDATE {{task}} AS task SET status = 'READY', concurrency = abs(task.concurrency)
WHERE task.id = ANY (ARRAY(SELECT id FROM admitted)) AND task.status || '' = 'BLOCKED'
RETURNING task.queue
"""


def admit(using: str, keys: Iterable[str | None]) -> int:
    """Make tasks of these keys READY, in the order of enqueueing, up to the capacity of each key. Returns how many.

    Wakes sleeping workers.
    """
    queues = admit_without_wake(using, keys)
    wake(using, queues)
    return len(queues)


def admit_without_wake(using: str, keys: Iterable[str | None]) -> list[str]:
    """Make tasks of these keys READY, as ``admit`` does. Returns the queue of each task; the caller wakes workers."""
    wanted = sorted({key for key in keys if key is not None})
    queues: list[str] = []
    for some in windows(wanted, KEYS_AT_ONCE):
        queues += _admit(using, some)
    return queues


def admit_on_commit(using: str, keys: Collection[str | None]) -> None:
    """Admit once the current transaction is committed."""
    if any(key is not None for key in keys):
        after_commit(using, admit, using, keys)


def _admit(using: str, keys: Sequence[str]) -> list[str]:
    """Admit to some keys; return the queue of each task that was admitted."""
    rated = [key for key in keys if key.startswith(RATED)]
    plain = [key for key in keys if not key.startswith(RATED)]
    rows = _admit_to(using, ADMIT_NEXT, plain) if plain else []
    queues = [queue for queue, _ in rows if queue is not None]
    # The keys that need the general statement.
    others = sorted(rated + [key for _, key in rows if key is not None])
    return queues + [queue for (queue,) in _admit_to(using, ADMIT, others)] if others else queues


def _admit_to(using: str, statement: str, keys: list[str]) -> list[tuple[Any, ...]]:
    return run(using, statement, array_of_texts(keys), prepared=True, first=locking(using, keys))


def locking(using: str, keys: list[str]) -> list[Part]:
    """Return the first statements of a message, so that no other transaction admits to these keys meanwhile."""
    # The statement that follows has a snapshot that is younger than the lock.
    return [*unsynced(using), (LOCK_KEYS, [keys]) if len(keys) > 1 else (LOCK_KEY, keys)]


def unsynced(using: str) -> list[str]:
    """Return the statement by which the commit of an admission does not wait for the disk.

    It need not wait: if the server crashes, upkeep admits again.
    """
    return [] if connections[using].in_atomic_block else ["SET LOCAL synchronous_commit = off"]


# The next keys at which tasks wait, behind one key, by one index probe for each key. After a crash, tasks may wait
# although their key is free.
BLOCKED_KEYS = """
WITH RECURSIVE found AS (
    (SELECT lock_key, 1 AS number FROM {task}
     WHERE lock_key > %s AND status = 'BLOCKED' AND finished_at IS NULL ORDER BY lock_key, status, id LIMIT 1)
    UNION ALL
    SELECT (SELECT task.lock_key FROM {task} AS task
            WHERE task.lock_key > found.lock_key AND task.status = 'BLOCKED' AND task.finished_at IS NULL
            ORDER BY task.lock_key, task.status, task.id LIMIT 1), number + 1
    FROM found WHERE found.lock_key IS NOT NULL AND number < %s
)
SELECT lock_key FROM found WHERE lock_key IS NOT NULL
"""

# The tasks that hold a key: admitted tasks, and tasks that keep it. The first thousand of each kind are read. The
# comment at ADMIT in admit.py says why keys are compared by ranges, and ready.py why the limit is a subquery.
HOLDERS = f"""
SELECT first.id FROM unnest(ARRAY['READY', 'RUNNING']) AS wanted (status) CROSS JOIN LATERAL (
    SELECT task.id FROM {{task}} AS task
    WHERE (task.lock_key, task.status) BETWEEN (%s, wanted.status) AND (%s, wanted.status)
      AND task.lock_key IS NOT NULL AND task.finished_at IS NULL
    ORDER BY task.lock_key, task.status, task.id LIMIT (SELECT 1000)) AS first
UNION ALL
({_KEEPERS.format(key="%s")} LIMIT (SELECT 1000))
ORDER BY id LIMIT %s
"""


def blocked_keys(using: str, after: str, *, limit: int = KEYS_AT_ONCE) -> list[str]:
    """Return, in order, up to ``limit`` keys behind ``after`` at which tasks wait."""
    return [key for (key,) in run(using, BLOCKED_KEYS, after, limit)]


def holders(using: str, key: str, *, limit: int) -> list[int]:
    """Return the ids of up to ``limit`` tasks that hold ``key``, the oldest first."""
    return [id_ for (id_,) in run(using, HOLDERS, *[key] * 4, limit, first=IN_INDEX_ORDER)]
