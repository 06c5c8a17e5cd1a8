"""How calls become rows: the INSERTs of one call and of many."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from django_pglock.postgres.connections import connection_for
from django_pglock.postgres.message import literals, send
from django_pglock.store.admit import ADMITTED, LOCK_KEY
from django_pglock.store.call import Call, Enqueued, due_of, is_alone, options_of, row_of, seconds_kept
from django_pglock.store.statements import array_of_numbers, bound, filled, message, run
from django_pglock.tasks.states import TaskStatus

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

# One call that is due at once and has no option that is stored in its own column.
ENQUEUE = """
INSERT INTO {task} (status, queue, priority, task_path, args, kwargs, backend, max_retries, meta)
VALUES ('READY', %s, %s, %s, %s, %s, %s, %s, %s)
RETURNING id, status, date_part('epoch', enqueued_at)
"""

# One call that is due at once and has a lock key or a rate, and no unique key. ``ENQUEUE_ONE`` does the same, but the
# server needs a third more time for it. The comment there says why the task is BLOCKED.
ENQUEUE_BLOCKED = """
INSERT INTO {task} (status, queue, priority, task_path, args, kwargs, backend, max_retries, meta,
    lock_key, fair_key, concurrency, keep_result)
VALUES ('BLOCKED', %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
RETURNING id, status, date_part('epoch', enqueued_at)
"""

# One call with a date, keys, or ``keep_result``. Returns nothing if its unique key is taken. A task with a lock key is
# always BLOCKED first, and ``ADMIT_OWN`` admits it right after the commit. If this statement itself checked whether
# another task holds the key, transactions that enqueue tasks of one key would wait for each other.
ENQUEUE_ONE = """
INSERT INTO {task} (status, run_after, queue, priority, task_path, args, kwargs, backend, max_retries, meta,
    lock_key, group_key, fair_key, unique_key, concurrency, unique_scope, unique_until, keep_result)
SELECT CASE WHEN moment.due > statement_timestamp() THEN 'SCHEDULED'
            WHEN moment.lock_key IS NOT NULL THEN 'BLOCKED'
            ELSE 'READY' END,
       moment.due, %s, %s, %s, %s::jsonb, %s::jsonb, %s, %s, %s::jsonb,
       moment.lock_key, %s, %s, %s, %s::int, %s, statement_timestamp() + make_interval(secs => %s), %s::int
FROM (SELECT COALESCE(%s::timestamptz, statement_timestamp() + %s::interval) AS due, %s AS lock_key) AS moment
ON CONFLICT DO NOTHING
RETURNING id, status, date_part('epoch', enqueued_at), unique_key
"""

# Many calls, which may differ in their arguments and keys, or one call that runs after other tasks. Ids are drawn from
# the sequence in the order of the rows.
ENQUEUE_MANY = """
WITH new AS (
    INSERT INTO {task} (status, run_after, queue, priority, task_path, args, kwargs, backend, max_retries, meta,
        lock_key, concurrency, group_key, fair_key, unique_key, unique_scope, unique_until, waits_for, keep_result)
    SELECT CASE WHEN moment.waits_for > 0 THEN 'BLOCKED'
                WHEN moment.due > statement_timestamp() THEN 'SCHEDULED'
                WHEN call.lock_key IS NOT NULL THEN 'BLOCKED'
                ELSE 'READY' END,
           moment.due, %s, %s, %s, call.args, call.kwargs, %s, %s, %s::jsonb,
           call.lock_key, %s, call.group_key, call.fair_key, call.unique_key, %s,
           statement_timestamp() + make_interval(secs => %s), moment.waits_for, %s
    FROM (SELECT COALESCE(%s::timestamptz, statement_timestamp() + %s::interval) AS due,
                 cardinality(%s::bigint[]) AS waits_for) AS moment,
         ROWS FROM (jsonb_array_elements(%s::jsonb), jsonb_array_elements(%s::jsonb),
                    jsonb_array_elements_text(%s::jsonb), jsonb_array_elements_text(%s::jsonb),
                    jsonb_array_elements_text(%s::jsonb), jsonb_array_elements_text(%s::jsonb)) WITH ORDINALITY
             AS call (args, kwargs, lock_key, group_key, fair_key, unique_key, number)
    ORDER BY call.number
    ON CONFLICT DO NOTHING
    RETURNING id, status, enqueued_at, unique_key
), waiters AS (
    INSERT INTO {waiter} (task_id, awaited) SELECT new.id, awaited FROM new, unnest(%s::bigint[]) AS awaited
)
SELECT id, status, date_part('epoch', enqueued_at), unique_key FROM new ORDER BY id
"""

# The same with ids that were drawn before. So the rows can be written in the order of their unique keys, not in the
# order of the calls. If two transactions wrote the same keys in different orders, they would deadlock. Returns one row:
# status, time, and the ids only if some calls were skipped.
ENQUEUE_WITH_IDS = (
    ENQUEUE_MANY.replace("INSERT INTO {task} (", "INSERT INTO {task} (id, ")
    .replace("    SELECT CASE", "    SELECT call.id, CASE")
    .replace("ROWS FROM (", "ROWS FROM (unnest(%s::bigint[]), ")
    .replace("AS call (", "AS call (id, ")
    .replace("RETURNING id, status, enqueued_at, unique_key", "RETURNING id, status, enqueued_at")
    .replace(
        "SELECT id, status, date_part('epoch', enqueued_at), unique_key FROM new ORDER BY id",
        "SELECT min(status), date_part('epoch', min(enqueued_at)), CASE WHEN count(*) < %s THEN array_agg(id) END\n"
        "FROM new",
    )
)


def insert_plain(using: str, task: TaskFields, call: Call, meta: str) -> Enqueued:
    """Write one call for which one row without options is enough."""
    connection = connection_for(using)
    connection.ensure_connection()
    statement = filled(ENQUEUE) % literals(connection, row_of(task, call, meta))
    return Enqueued(*(send(connection, statement) or ()))


def insert_calls(
    using: str, task: TaskFields, calls: Sequence[Call], meta: str, ids: Sequence[int] = ()
) -> list[Enqueued]:
    """Write calls by one statement. Return the rows in order, without the calls whose unique key is taken.

    ``ids``: one id for each call, drawn before, if the rows are to be written in another order than the calls.
    """
    if ids:
        return _insert_with_ids(using, task, calls, meta, ids)
    if len(calls) == 1 and not task.after:
        return _insert_one(using, task, calls[0], meta)
    return [Enqueued(*row) for row in run(using, ENQUEUE_MANY, *_values_of_many(task, calls, meta))]


def values_of_one(task: TaskFields, call: Call, meta: str) -> tuple[Any, ...]:
    """Return the values of ``ENQUEUE_ONE``."""
    own = (call.group, call.fair, call.unique, *options_of(task), *due_of(task), call.lock)
    return *row_of(task, call, meta), *own


def _insert_one(using: str, task: TaskFields, call: Call, meta: str) -> list[Enqueued]:
    connection = connection_for(using)
    connection.ensure_connection()
    is_at_once = due_of(task) == (None, None)
    if is_at_once and call.lock is not None and call.unique is None and call.group is None:
        values = (*row_of(task, call, meta), call.lock, call.fair, task.concurrency, seconds_kept(task))
        statement = bound(using, ENQUEUE_BLOCKED, values)
    else:
        statement = bound(using, ENQUEUE_ONE, values_of_one(task, call, meta))
    row = send(connection, statement)
    return [Enqueued(*row)] if row else []


def _insert_with_ids(
    using: str, task: TaskFields, calls: Sequence[Call], meta: str, ids: Sequence[int]
) -> list[Enqueued]:
    values = _values_of_many(task, calls, meta, array_of_numbers(ids))
    [(status, enqueued_at, some)] = run(using, ENQUEUE_WITH_IDS, *values, len(calls))
    if status is None:
        return []
    written = set(ids if some is None else some)
    return [
        Enqueued(id_, status, enqueued_at, call.unique) for id_, call in zip(ids, calls, strict=True) if id_ in written
    ]


def _values_of_many(task: TaskFields, calls: Sequence[Call], meta: str, *ids: str) -> tuple[Any, ...]:
    unique, after = task.unique, list(task.after)
    keys = (
        _column((call.lock for call in calls), any_=calls[0].lock is not None),
        _column((call.group for call in calls), any_=task.group is not None),
        _column((call.fair for call in calls), any_=task.fair is not None),
        _column((call.unique for call in calls), any_=unique is not None),
    )
    return (
        *(task.queue_name, task.priority, task.module_path, task.backend, task.max_attempts - 1, meta),
        *options_of(task),
        *due_of(task),
        after,
        *ids,
        f"[{','.join([call.args for call in calls])}]",
        f"[{','.join([call.kwargs for call in calls])}]",
        *keys,
        after,
    )


def _column(values: Iterable[str | None], *, any_: bool) -> str | None:
    # The server pads a missing array with NULL. JSON, because psycopg would build an array of texts text by text.
    return json.dumps(list(values), ensure_ascii=False) if any_ else None


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


def insert_at_key(using: str, task: TaskFields, call: Call, meta: str) -> tuple[Enqueued, bool]:
    """Write one call with a lock key.

    Also returns whether the call waits for another task whose end admits to the key. Then nothing else has to be done.
    """
    key = call.lock
    enqueued, other = insert_by(using, key, ENQUEUE_AT_KEY, (key, key, *values_of_one(task, call, meta)))
    return enqueued, enqueued.status == TaskStatus.BLOCKED and is_alone(task) and other in ADMITTED


def insert_by(using: str, key: str | None, statement: str, values: Sequence[Any]) -> tuple[Enqueued, Any]:
    """Write one call while no other transaction admits to its key. Also return the statement's answer about the key."""
    connection = connection_for(using)
    connection.ensure_connection()
    *row, said = send(connection, message(using, (LOCK_KEY, [key]), (statement, values))) or ()
    return Enqueued(*row), said
