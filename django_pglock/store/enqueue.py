"""Enqueueing: calls become rows in the caller's transaction. Admission and wake-ups are done after its commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from django.db import OperationalError, transaction
from psycopg.errors import LockNotAvailable

from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.connections import connection_for, in_transaction
from django_pglock.postgres.message import literals, send
from django_pglock.store.admit import LOCK_KEY, admit, unsynced
from django_pglock.store.insert_tasks import (
    Call,
    Enqueued,
    columns_of,
    due_of,
    insert_calls,
    insert_each,
    insert_of,
    is_alone,
    meta_of,
)
from django_pglock.store.release import release_ended_on_commit
from django_pglock.store.statements import array_of_numbers, filled, message, run
from django_pglock.store.unique import enqueue_unique
from django_pglock.store.wake import after_commit, wake, wake_parents
from django_pglock.tasks import registry
from django_pglock.tasks.states import TaskStatus

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

logger = get_logger(WORKER)


def enqueue(using: str, task: TaskFields, call: Call, *, meta: str = "{}") -> Enqueued:
    """Add one call of ``task`` in the caller's transaction.

    After the commit, sleeping workers are woken, and a task with a key is admitted. Raises ``DuplicateTask``.
    """
    if call.lock is None or not can_admit_at_once(using, task):
        return enqueue_many(using, task, [call], meta=meta)[0]
    enqueued, is_done = enqueue_one(using, task, call, meta)
    if enqueued.status != TaskStatus.BLOCKED:
        _wake(using, task, {enqueued.status})
    elif not is_done:
        after_commit(using, admit_next, using, [call.lock], is_rated=task.rate is not None)
    return enqueued


def enqueue_many(using: str, task: TaskFields, calls: Sequence[Call], *, meta: str = "{}") -> list[Enqueued]:
    """Add calls of ``task``, in order, by one statement.

    Calls of a unique task may need more statements, if they are many or if some of their keys are taken. Pass all such
    calls of a transaction at once. Then the transaction takes their keys in the same order as all other transactions.
    """
    write = insert_calls if task.unique is None else enqueue_unique
    rows = write(using, task, calls, meta)
    statuses = {row.status for row in rows}
    if awaited := task.awaited:
        release_ended_on_commit(using, awaited)
    elif TaskStatus.BLOCKED in statuses:
        _admit_on_commit(using, task, calls, rows)
    _wake(using, task, statuses)
    return rows


def enqueue_each(using: str, calls: Sequence[tuple[TaskFields, Call, str]]) -> list[Enqueued]:
    """Add one call, with its ``meta``, of each of several tasks by one statement.

    Not for unique tasks, and not for those that run after others.
    """
    rows = insert_each(using, calls)
    keys, is_rated = set(), False
    for (task, call, _), row in zip(calls, rows, strict=True):
        _wake(using, task, {row.status})
        if row.status == TaskStatus.BLOCKED:
            keys.add(str(call.lock))
            is_rated |= task.rate is not None
    if keys:
        after_commit(using, admit_next, using, keys, is_rated=is_rated)
    return rows


# Enqueues a function that this process does not know, in the queues of the failed tasks. A worker that knows it will
# run it.
ENQUEUE_UNKNOWN = """
INSERT INTO {task} (queue, backend, task_path, args)
SELECT failed.queue, failed.backend, %s, jsonb_build_array(failed.id) FROM {task} AS failed
WHERE failed.id = ANY (%s::bigint[])
"""


def enqueue_handlers(using: str, failed: Iterable[tuple[int, str]]) -> None:
    """Enqueue the functions of ``on_failure=``: pairs of the id of a failed task and the path of its function.

    In the transaction that makes these tasks FAILED. If the database refuses a function, that is logged: otherwise the
    failed task would never end.
    """
    ids: dict[str, list[int]] = {}
    for id_, path in failed:
        ids.setdefault(path, []).append(id_)
    for path, numbers in ids.items():
        _enqueue_handler(using, path, numbers)


def _enqueue_handler(using: str, path: str, ids: list[int]) -> None:
    handler = registry.find(path)
    try:
        with transaction.atomic(using=using):
            if handler is None:
                run(using, ENQUEUE_UNKNOWN, path, array_of_numbers(ids))
            else:
                enqueue_many(using, handler, [Call(f"[{id_}]", "{}") for id_ in ids], meta=meta_of(handler))
    except Exception:
        logger.exception("on_failure of the tasks %s: %s cannot be enqueued.", ids, path)


def _admit_on_commit(using: str, task: TaskFields, calls: Sequence[Call], rows: Sequence[Enqueued]) -> None:
    keys = [call.lock for call in calls if call.lock is not None]
    if len(rows) == len(keys) == 1:
        after_commit(using, admit_one, using, task, rows[0].id, keys[0])
    else:
        after_commit(using, admit_next, using, keys, is_rated=task.rate is not None)


def _wake(using: str, task: TaskFields, statuses: set[str]) -> None:
    if TaskStatus.READY in statuses:
        wake(using, [task.queue_name])
    if TaskStatus.SCHEDULED in statuses:
        wake_parents(using)


# One call with a key: written and admitted by one message, or admitted right after the commit of its transaction.
#
# Most keys admit such a call, or have a task whose end will admit the next one. Two short statements find this out in
# a third of the time that the statements of admit.py need. Only one transaction at a time admits to a key, here as
# well.


class Gate(NamedTuple):
    """What one task of a key has to find, as SQL: the condition, what it reads and writes for it, and what it finds."""

    #: Whether the task is admitted.
    is_open: str
    #: Whether something is certain to admit to the key later, so that a task that is not admitted just waits for it.
    is_known: str
    #: A query before the task is written or changed, and one after that.
    before: str = ""
    after: str = ""


# Another task of the key. If one is admitted, it is found before all BLOCKED ones, because BLOCKED is the first status
# in the order.
_OTHER = """
other AS MATERIALIZED (
    SELECT task.status FROM {task} AS task
    WHERE task.lock_key BETWEEN {key} AND {key} AND task.lock_key IS NOT NULL AND task.finished_at IS NULL
      AND task.id <> {id}
    ORDER BY task.lock_key DESC, task.status DESC, task.id DESC LIMIT 1
)"""

# Whether the bucket of a key has a token, no other task waits for one, and fewer tasks than the burst are READY. If the
# key is also a lock key, no other task of it may be admitted or wait for a retry. The comment at ``ADMIT`` in admit.py
# says why. BLOCKED tasks are the first in this range of the index, so one probe is enough.
_HAS_ROOM = """(
    SELECT count(*) < {most} AND min(ahead.status) IS DISTINCT FROM 'BLOCKED'
    FROM (SELECT task.status FROM {task} AS task
          WHERE (task.lock_key, task.status) BETWEEN ({key}, 'BLOCKED') AND ({key}, '{last}')
            AND task.lock_key IS NOT NULL AND task.finished_at IS NULL AND task.id <> {id}
          ORDER BY task.lock_key, task.status, task.id LIMIT {most}) AS ahead
) AND COALESCE((
    SELECT arrives_at <= clock_timestamp() + make_interval(secs => {tokens}) FROM {rate_limit} WHERE key = {key}
), true)"""

# Takes a token: for a new task if there is one, and for an enqueued task if that was admitted. No other transaction
# takes one meanwhile, because this one has locked the key.
_TAKE = """
token AS (
    INSERT INTO {rate_limit} AS bucket (key, arrives_at)
    SELECT {key}, clock_timestamp() + make_interval(secs => {interval}) {source}
    ON CONFLICT (key) DO UPDATE
    SET arrives_at = GREATEST(bucket.arrives_at, clock_timestamp()) + make_interval(secs => {interval}), opens_at = NULL
    RETURNING key
)"""
#: Whether the date of the next token is set.
_HAS_DATE = "(SELECT opens_at > clock_timestamp() FROM {rate_limit} WHERE key = {key})"

# Each use of the table of tasks costs the planner as much as a small statement. So beside the look at the key, the row
# is the only use of it. If it was cancelled or admitted meanwhile, it is not found, and takes no token.
_OWN = """
own AS (
    UPDATE {task} AS task SET status = 'READY'
    WHERE task.id = {id} AND task.status || '' = 'BLOCKED' AND task.waits_for = 0 AND {is_open}
      AND (SELECT set_config('lock_timeout', '100ms', true)) <> ''
    RETURNING task.id
)"""


def can_admit_at_once(using: str, task: TaskFields) -> bool:
    """Return whether a call with a key can be written and admitted in one transaction of our own."""
    has_token = task.rate is None or (_has_gate(task) and due_of(task) == (None, None))
    return has_token and not task.awaited and task.unique is None and not in_transaction(connection_for(using))


def enqueue_one(using: str, task: TaskFields, call: Call, meta: str) -> tuple[Enqueued, bool]:
    """Write one call with a key, and admit it if its key has free capacity.

    Also returns whether nothing else has to be done, because what the call waits for admits to the key.
    """
    statement = message(using, (LOCK_KEY, [call.lock]), enqueue_statement(using, task, call, meta))
    *row, is_known = send(connection_for(using), statement) or ()
    return Enqueued(*row), is_known is True


def admit_one(using: str, task: TaskFields, id_: int, key: str) -> None:
    """Admit one task to its key right after the commit of the transaction that enqueued it."""
    is_admitted, is_known = _admit_one(using, task, id_, key) if _has_gate(task) else (False, False)
    if is_admitted:
        wake(using, [task.queue_name])
    elif not is_known:
        admit_next(using, [key], is_rated=task.rate is not None)


def admit_next(using: str, keys: Iterable[str], *, is_rated: bool) -> None:
    """Admit to the keys of new calls by the general statements."""
    admit(using, keys)
    if is_rated:
        # Admission may have set the date of the next token. A sleeping worker has to read this date.
        wake_parents(using)


def _admit_one(using: str, task: TaskFields, id_: int, key: str) -> tuple[bool, bool]:
    connection = connection_for(using)
    connection.ensure_connection()
    statements = message(using, *unsynced(using), (LOCK_KEY, [key]), admit_statement(using, task, id_, key))
    try:
        admitted, is_known = send(connection, statements) or ()
    except OperationalError as error:
        if not isinstance(error.__cause__, LockNotAvailable):
            raise
        # Another transaction has already locked the row, for example to cancel the task.
        return False, False
    return admitted, is_known is True


def enqueue_statement(using: str, task: TaskFields, call: Call, meta: str) -> str:
    """Return the statement that writes a call and admits it, right after ``LOCK_KEY`` in the same message.

    Not for unique tasks: the INSERT may wait for another transaction, and all other tasks of the key would wait, too.
    """
    connection = connection_for(using)
    connection.ensure_connection()
    [key] = literals(connection, [call.lock])
    gate = _gate(task, key)
    columns = columns_of(connection, task, call, meta, ready_if=gate.is_open)
    return f"WITH {gate.before} {insert_of(columns)}, {gate.is_known}"


def admit_statement(using: str, task: TaskFields, id_: int, key: str) -> str:
    """Return the statement that admits one task. The connection must be open."""
    [quoted] = literals(connection_for(using), [key])
    gate = _gate(task, quoted, id_)
    own = _OWN.format(task=filled("{task}"), id=id_, is_open=gate.is_open)
    parts = ",".join(each for each in (gate.before, own, gate.after) if each)
    return f"WITH {parts} SELECT EXISTS (SELECT FROM own), {gate.is_known}"


def _has_gate(task: TaskFields) -> bool:
    """Return whether the short statements can admit the task: not if it shares a lock key at a rate."""
    return task.rate is None or task.lock is None or is_alone(task)


def _gate(task: TaskFields, key: str, id_: int = 0) -> Gate:
    """Return the gate of a key, which is quoted. ``id_``: the task, if its row is already there."""
    names = {"task": filled("{task}"), "rate_limit": filled("{rate_limit}"), "key": key, "id": id_}
    if task.rate is None:
        # If others may run beside the task, only the general statements know how many.
        is_known = "(SELECT status IN ('READY', 'RUNNING') FROM other)" if is_alone(task) else "false"
        return Gate("NOT EXISTS (SELECT FROM other)", is_known, before=_OTHER.format(**names))
    interval, portion = task.rate.interval, task.rate.portion
    # Tasks of a lock key count until they have ended. All others count until they run.
    most, last = (portion, "READY") if task.lock is None else (1, "SCHEDULED")
    names |= {"interval": repr(interval), "tokens": repr((portion - 1) * interval), "most": most, "last": last}
    has_room, has_date = _HAS_ROOM.format(**names), _HAS_DATE.format(**names)
    if id_:
        return Gate(has_room, has_date, after=_TAKE.format(**names, source="FROM own"))
    return Gate("EXISTS (SELECT FROM token)", has_date, before=_TAKE.format(**names, source=f"WHERE {has_room}"))
