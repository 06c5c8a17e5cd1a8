"""Writes a call with a lock key or a rate, and admits it to its key, in one transaction of our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django_pglock.postgres.connections import connection_for
from django_pglock.postgres.message import send
from django_pglock.store.admit import ADMITTED, LOCK_KEY, capacity_at_rate
from django_pglock.store.call import Call, Enqueued, is_alone, row_of, seconds_kept
from django_pglock.store.insert_tasks import ENQUEUE_ONE, values_of_one
from django_pglock.store.statements import message
from django_pglock.tasks.states import TaskStatus

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

# Does the same as ``ENQUEUE_ONE``, right after ``LOCK_KEY`` in the same message, which is a transaction. So a task that
# is the only one of its key needs no second transaction for its admission. Also returns the status of another task of
# the key. If one is admitted, the status is that of an admitted one, because BLOCKED is the first status in the order.
# This is not for unique tasks: the INSERT may wait for another transaction, and all other tasks of the key would wait,
# too.
ENQUEUE_AT_KEY = f"""
WITH other AS MATERIALIZED (
    SELECT task.status FROM {{task}} AS task
    WHERE task.lock_key BETWEEN %s AND %s AND task.lock_key IS NOT NULL AND task.finished_at IS NULL
    ORDER BY task.lock_key DESC, task.status DESC, task.id DESC LIMIT 1
)
{ENQUEUE_ONE.strip().replace("moment.lock_key IS NOT NULL", "EXISTS (SELECT FROM other)")},
    (SELECT status FROM other)
"""

# One call that is due at once and has a rate. It takes a token from the bucket of its key if the bucket has one, no
# other task waits for a token, and fewer tasks than the burst are READY. If the key is also a lock key, no other task
# of it may be admitted or wait for a retry. The comment at ``ADMIT`` in admit.py says why. BLOCKED tasks are the first
# in this range of the index, so one probe is enough. Also returns whether ``opens_at`` is set for the next token. If it
# is, nothing else has to be done for a BLOCKED task. The task has no unique key, so the statement needs no ON CONFLICT,
# which would make the server search for conflicts before it writes.
ENQUEUE_AT_RATE = """
WITH token AS (
    INSERT INTO {rate_limit} AS bucket (key, arrives_at)
    SELECT %s, clock_timestamp() + make_interval(secs => %s)
    FROM (SELECT task.status FROM {task} AS task
          WHERE (task.lock_key, task.status) BETWEEN (%s, 'BLOCKED') AND (%s, %s)
            AND task.lock_key IS NOT NULL AND task.finished_at IS NULL
          ORDER BY task.lock_key, task.status, task.id LIMIT %s) AS ahead
    HAVING count(*) < %s AND min(ahead.status) IS DISTINCT FROM 'BLOCKED'
    ON CONFLICT (key) DO UPDATE
    SET arrives_at = GREATEST(bucket.arrives_at, clock_timestamp()) + make_interval(secs => %s), opens_at = NULL
    WHERE bucket.arrives_at <= clock_timestamp() + make_interval(secs => %s)
    RETURNING key
)
INSERT INTO {task} (status, queue, priority, task_path, args, kwargs, backend, max_retries, meta,
    lock_key, fair_key, concurrency, keep_result)
SELECT CASE WHEN EXISTS (SELECT FROM token) THEN 'READY' ELSE 'BLOCKED' END,
       %s, %s, %s, %s::jsonb, %s::jsonb, %s, %s, %s::jsonb, %s, %s, %s::int, %s::int
RETURNING id, status, date_part('epoch', enqueued_at), NULL,
          (SELECT opens_at > clock_timestamp() FROM {rate_limit} WHERE key = %s)
"""


def insert_at_key(using: str, task: TaskFields, call: Call, meta: str) -> tuple[Enqueued, bool]:
    """Write one call with a lock key.

    Also returns whether the call waits for another task whose end admits to the key. Then nothing else has to be done.
    """
    key = call.lock
    enqueued, other = _insert(using, key, ENQUEUE_AT_KEY, (key, key, *values_of_one(task, call, meta)))
    return enqueued, enqueued.status == TaskStatus.BLOCKED and is_alone(task) and other in ADMITTED


def insert_at_rate(using: str, task: TaskFields, call: Call, meta: str) -> tuple[Enqueued, bool]:
    """Write one call with a rate. If it also has a lock key, no other task of this key may run at the same time.

    Also returns whether the call waits for a token whose date is set. Then nothing else has to be done.
    """
    assert task.rate is not None  # noqa: S101 - for the type checker
    key, interval = call.lock, task.rate.interval
    most, last = capacity_at_rate(task.rate, is_alone=task.lock is not None)
    values = (
        *(key, interval, key, key, last, most, most, interval, (task.rate.portion - 1) * interval),
        *(*row_of(task, call, meta), key, call.fair, task.concurrency, seconds_kept(task), key),
    )
    enqueued, is_token_scheduled = _insert(using, key, ENQUEUE_AT_RATE, values)
    return enqueued, enqueued.status == TaskStatus.BLOCKED and is_token_scheduled is True


def _insert(using: str, key: str | None, statement: str, values: Sequence[Any]) -> tuple[Enqueued, Any]:
    """Write one call while no other transaction admits to its key. Also return the statement's answer about the key."""
    connection = connection_for(using)
    connection.ensure_connection()
    *row, said = send(connection, message(using, (LOCK_KEY, [key]), (statement, values))) or ()
    return Enqueued(*row), said
