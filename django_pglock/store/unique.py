"""Enqueues calls with ``unique=``: if the unique key of a call is taken, there is no second task."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from django.db import connections
from django.db.models import Q

from django_pglock.errors import DuplicateTask
from django_pglock.postgres.connections import connection_for, in_transaction, transaction_block
from django_pglock.postgres.message import execute_text
from django_pglock.store.admit import admit_on_commit
from django_pglock.store.insert_tasks import Call, Enqueued, batches, columns_of, insert_calls
from django_pglock.store.statements import filled, run
from django_pglock.tasks.states import UniqueScope

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

#: The largest number of attempts to insert one call. Another attempt follows if the task that had the key is gone when
#: it is searched.
MOST_INSERTS = 100

#: Whether a task has its unique key taken, so that no other task with this key can be enqueued. This is also the
#: condition of the index on these keys. PostgreSQL uses the index only for a query with the same condition.
HAS_UNIQUE_KEY = (
    Q(unique_scope=UniqueScope.WAITING, attempts=0, finished_at__isnull=True)
    | Q(unique_scope=UniqueScope.UNFINISHED, finished_at__isnull=True)
    | Q(unique_scope=UniqueScope.PERIOD)
)

# Draws ids for calls that are not written in their order. The answer is one text, because each row of an answer costs
# time in the client. MATERIALIZED, because otherwise the server would look up the name of the sequence for each id.
ALLOCATE_IDS = """
WITH serial AS MATERIALIZED (SELECT pg_get_serial_sequence('{task}', 'id')::regclass AS sequence)
SELECT string_agg(nextval(serial.sequence)::text, ',') FROM serial, generate_series(1, %s)
"""

# Whether the period of a task is over. It is also over if it begins further in the future than it is long: then the
# clock was put back by more than the period.
_IS_OVER = """(unique_until <= clock_timestamp()
        OR enqueued_at - clock_timestamp() > unique_until - enqueued_at)"""

# Frees keys whose period is over.
FREE_EXPIRED_UNIQUE = f"""
UPDATE {{task}} SET unique_key = NULL, unique_scope = NULL, unique_until = NULL
WHERE unique_key = ANY (%s::text[]) AND unique_scope = 'PERIOD' AND {_IS_OVER}
"""

# The tasks that have these unique keys, and the scope of each, in a transaction of the caller. The waiting task must
# see the changes of this transaction. So its row is locked to the end of the transaction, because workers skip locked
# rows. If a worker claims the task first, this statement waits for the claim, and then no longer finds the task. The
# rows are locked in the order in which all transactions take their keys. A task that is unique also while it runs is
# not locked, because its settle must not wait.
FIND_AND_LOCK_UNIQUE = f"""
WITH wanted AS MATERIALIZED (
    SELECT %s::text[] AS keys
), waiting AS MATERIALIZED (
    SELECT id, status, enqueued_at, unique_key, unique_scope FROM {{task}}
    WHERE unique_key = ANY ((SELECT keys FROM wanted)::text[])
      AND unique_scope = 'WAITING' AND attempts = 0 AND finished_at IS NULL
    ORDER BY {{in_order_of_keys}} FOR SHARE
)
SELECT id, status, date_part('epoch', enqueued_at), unique_key, unique_scope FROM waiting
UNION ALL
SELECT id, status, date_part('epoch', enqueued_at), unique_key, unique_scope FROM {{task}}
WHERE unique_key = ANY ((SELECT keys FROM wanted)::text[])
  AND (unique_scope = 'UNFINISHED' AND finished_at IS NULL
       OR unique_scope = 'PERIOD' AND NOT {_IS_OVER})
"""
# The same without a transaction of the caller.
FIND_UNIQUE = FIND_AND_LOCK_UNIQUE.replace(" FOR SHARE", "")

# Replaces the call of a waiting task by the new call. It writes each column that a call fills, and the task no longer
# waits for the ``after=`` tasks of the first call. A task that was claimed meanwhile is not found. Also returns the old
# lock key: if the new key differs, the task no longer waits at the old one.
REPLACE_UNIQUE = """
WITH old AS MATERIALIZED (
    SELECT id, lock_key FROM {task}
    WHERE unique_key = {key} AND unique_scope = 'WAITING' AND attempts = 0 AND finished_at IS NULL
    FOR NO KEY UPDATE
), waits AS (
    DELETE FROM {waiter} WHERE task_id = ANY (ARRAY(SELECT id FROM old))
)
UPDATE {task} AS task SET {changes}, waits_for = 0
FROM old WHERE task.id = old.id AND task.id = ANY (ARRAY(SELECT id FROM old))
RETURNING task.id, task.status, date_part('epoch', task.enqueued_at), task.unique_key, old.lock_key
"""
# The columns that a call fills. DEFAULT: it does not fill this one.
_REPLACED = (
    *("args", "kwargs", "queue", "priority", "backend", "max_retries", "meta", "lock_key", "concurrency", "group_key"),
    *("fair_key", "keep_result", "run_after", "status"),
)


def enqueue_unique(using: str, task: TaskFields, calls: Sequence[Call], meta: str) -> list[Enqueued]:
    """Insert the new calls, and find the existing tasks of the other calls, in one transaction.

    Returns the tasks in the order of the calls. Raises ``DuplicateTask``.
    """
    on_conflict = _on_conflict(task)
    # Checked before our own transaction begins. Without a transaction of the caller, its changes are already committed,
    # so any run sees them. REPLACE_UNIQUE takes a stronger lock: two transactions that both took this one first would
    # wait for each other.
    is_inside = in_transaction(connection_for(using))
    find = FIND_AND_LOCK_UNIQUE if is_inside and on_conflict != "replace" else FIND_UNIQUE
    by_key = _one_per_key(calls, last=on_conflict == "replace")
    if on_conflict == "raise" and len(by_key) < len(calls):
        raise DuplicateTask(f"Several of these calls of {task.module_path} have the same unique key.", result_id="")
    # In the order of ``IN_ORDER_OF_KEYS`` in SQL.
    keys = sorted(sorted(by_key), key=len)
    # A call that replaces has its row, old or new, before the next key is touched. So all transactions take the keys in
    # one order. The other calls are inserted by few statements, and their locks of old rows do not exclude each other.
    parts = [[key] for key in keys] if on_conflict == "replace" else [keys]
    found: dict[str, Enqueued] = {}
    with nullcontext() if len(calls) == 1 else transaction_block(using):
        ids = _allocated_ids(using, by_key)
        for part in parts:
            found |= _insert_or_find(using, task, {key: by_key[key] for key in part}, meta, find, ids)
    return [found[str(call.unique)] for call in calls]


def _insert_or_find(
    using: str, task: TaskFields, left: dict[str, Call], meta: str, find: str, ids: dict[str, int]
) -> dict[str, Enqueued]:
    """Insert and find until each call has a task."""
    found: dict[str, Enqueued] = {}
    on_conflict = _on_conflict(task)
    for _ in range(MOST_INSERTS):
        if on_conflict == "replace":
            _take(found, left, [row for call in left.values() for row in _replace(using, task, call, meta)])
        for batch in batches(list(left.values())):
            drawn = [ids[str(call.unique)] for call in batch] if ids else []
            _take(found, left, insert_calls(using, task, batch, meta, drawn))
        for *row, scope in run(using, find, list(left)) if left else ():
            _refuse(task, row[0], scope)
            if on_conflict == "skip":
                _take(found, left, [Enqueued(*row)._replace(is_new=False)])
        if not left:
            return found
        # The task that had the key no longer exists, or the period of its key is over.
        run(using, FREE_EXPIRED_UNIQUE, list(left))
    raise DuplicateTask(
        f"{MOST_INSERTS} times, a task of {task.module_path} with the same unique key was enqueued and finished "
        "meanwhile.",
        result_id="",
    )


def _take(found: dict[str, Enqueued], left: dict[str, Call], rows: Iterable[Enqueued]) -> None:
    """Note the tasks of some calls, which are no longer left."""
    for row in rows:
        found[str(row.unique_key)] = row
        left.pop(str(row.unique_key), None)


def _allocated_ids(using: str, keys: Collection[str]) -> dict[str, int]:
    """Return an id for each key, in the order of the calls, because the rows are written in another order."""
    if len(keys) == 1:
        return {}
    [(text,)] = run(using, ALLOCATE_IDS, len(keys))
    return dict(zip(keys, sorted(map(int, text.split(","))), strict=True))


def _replace(using: str, task: TaskFields, call: Call, meta: str) -> list[Enqueued]:
    with connections[using].cursor() as cursor:
        execute_text(cursor, replace_statement(using, task, call, meta))
        rows = cursor.fetchall()
    admit_on_commit(using, {key_before for *_, key_before in rows} - {call.lock})
    return [Enqueued(*row)._replace(is_new=False) for *row, _key_before in rows]


def replace_statement(using: str, task: TaskFields, call: Call, meta: str) -> str:
    """Return ``REPLACE_UNIQUE`` for a call. The connection must be open."""
    columns = columns_of(connection_for(using), task, call, meta)
    changes = ", ".join(f"{name} = {columns.get(name, 'DEFAULT')}" for name in _REPLACED)
    tables = {"task": filled("{task}"), "waiter": filled("{waiter}")}
    return REPLACE_UNIQUE.format(**tables, key=columns["unique_key"], changes=changes)


def _one_per_key(calls: Sequence[Call], *, last: bool) -> dict[str, Call]:
    """Return the first or the last call of each unique key, in the order of the first calls."""
    by_key = {str(call.unique): call for call in calls}
    if len(by_key) < len(calls) and not last:
        by_key |= {str(call.unique): call for call in reversed(calls)}
    return by_key


def _on_conflict(task: TaskFields) -> str:
    return task.unique.on_conflict if task.unique is not None else "skip"


def _refuse(task: TaskFields, id_: int, scope: str) -> None:
    """Raise ``DuplicateTask`` if a call cannot be enqueued because this task has its unique key."""
    what = f"Task {id_} of {task.module_path} has the same unique key"
    if _on_conflict(task) == "raise":
        raise DuplicateTask(f"{what}.", result_id=str(id_))
    if _on_conflict(task) == "replace" and scope != UniqueScope.WAITING:
        raise DuplicateTask(
            f"{what}, which stays taken after the task starts. This call cannot replace it.", result_id=str(id_)
        )
