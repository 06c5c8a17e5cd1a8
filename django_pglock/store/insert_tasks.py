"""How calls become rows: one INSERT for one call, and one for many.

An INSERT names only the columns whose values differ from their defaults. So the server plans no more than a call needs,
and a call without options costs as little as an INSERT by hand. All values are literals, because a message of several
statements has no parameters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django_pglock.postgres.connections import connection_for
from django_pglock.postgres.message import literals, send
from django_pglock.store.admit import ADMITTED, LOCK_KEY
from django_pglock.store.call import Call, Enqueued, due_of, is_alone, row_of
from django_pglock.store.statements import array_of_numbers, filled, message
from django_pglock.tasks.states import TaskStatus

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

#: What one INSERT returns.
RETURNING = "RETURNING id, status, date_part('epoch', enqueued_at)"

# Many calls of one task, which may differ in their arguments and keys. Ids are drawn from the sequence in the order of
# the rows, unless they were drawn before: then the rows can be written in the order of their unique keys. If two
# transactions wrote the same keys in different orders, they would deadlock. Returns one row, because each row of an
# answer costs time in the client. All tasks have the same status and date. Without ids, all calls were skipped.
ENQUEUE_MANY = """
WITH new AS (
    {insert}
    FROM ROWS FROM ({arrays}) WITH ORDINALITY AS call ({names}, number)
    ORDER BY call.number
    ON CONFLICT DO NOTHING
    RETURNING id, status, enqueued_at
), waiters AS (
    INSERT INTO {waiter} (task_id, awaited) SELECT new.id, awaited FROM new, unnest({awaited}::bigint[]) AS awaited
)
SELECT min(status), date_part('epoch', min(enqueued_at)), string_agg(id::text, ',' ORDER BY id) FROM new
"""

# Right after ``LOCK_KEY`` in the same message, which is a transaction: a task that is the only one of its key needs no
# second transaction for its admission. Also returns the status of another task of the key. If one is admitted, the
# status is that of an admitted one, because BLOCKED is the first status in the order. This is not for unique tasks: the
# INSERT may wait for another transaction, and all other tasks of the key would wait, too.
AT_KEY = """
WITH other AS MATERIALIZED (
    SELECT task.status FROM {task} AS task
    WHERE task.lock_key BETWEEN {key} AND {key} AND task.lock_key IS NOT NULL AND task.finished_at IS NULL
    ORDER BY task.lock_key DESC, task.status DESC, task.id DESC LIMIT 1
)
{insert}, (SELECT status FROM other)
"""


class Row:
    """The columns of a new row that differ from their defaults, each with its value as SQL.

    A task with a lock key is always BLOCKED first, and ``ADMIT_OWN`` admits it right after the commit, unless
    ``blocked_if`` is a condition. If each INSERT checked whether another task holds the key, transactions that enqueue
    tasks of one key would wait for each other.
    """

    def __init__(self, connection: Any, task: TaskFields, call: Call, meta: str, *, blocked_if: str = "") -> None:
        given = {name: value for name, value in row_of(task, call, meta).items() if value is not None}
        self.columns = dict(zip(given, literals(connection, given.values()), strict=True))
        if task.unique is not None and task.unique.seconds is not None:
            self.columns["unique_until"] = _after(task.unique.seconds)
        status = "'READY'" if call.lock is None else "'BLOCKED'"
        if blocked_if:
            status = f"CASE WHEN {blocked_if} THEN 'BLOCKED' ELSE 'READY' END"
        date, delay = due_of(task)
        due = _after(delay.total_seconds()) if delay is not None else date and f"'{date.isoformat()}'::timestamptz"
        if due:
            self.columns["run_after"] = due
            status = f"CASE WHEN {due} > statement_timestamp() THEN 'SCHEDULED' ELSE {status} END"
        self.columns["status"] = status

    @property
    def insert(self) -> str:
        """The INSERT of this row."""
        names, values = ", ".join(self.columns), ", ".join(self.columns.values())
        conflict = "ON CONFLICT DO NOTHING " if "unique_key" in self.columns else ""
        return f"INSERT INTO {filled('{task}')} ({names}) VALUES ({values}) {conflict}{RETURNING}"

    @property
    def select(self) -> str:
        """The INSERT of rows with these values from a query, whose FROM follows."""
        return f"INSERT INTO {filled('{task}')} ({', '.join(self.columns)}) SELECT {', '.join(self.columns.values())}"


def insert_one(using: str, task: TaskFields, call: Call, meta: str) -> list[Enqueued]:
    """Write one call. Return its row, or no row if its unique key is taken."""
    connection = connection_for(using)
    connection.ensure_connection()
    row: Any = send(connection, Row(connection, task, call, meta).insert)
    return [Enqueued(row[0], row[1], row[2], call.unique)] if row else []


def insert_calls(
    using: str, task: TaskFields, calls: Sequence[Call], meta: str, ids: Sequence[int] = ()
) -> list[Enqueued]:
    """Write calls by one statement. Return the rows in order, without the calls whose unique key is taken.

    ``ids``: one id for each call, drawn before, if the rows are to be written in another order than the calls.
    """
    if len(calls) == 1 and not task.after and not ids:
        return insert_one(using, task, calls[0], meta)
    connection = connection_for(using)
    connection.ensure_connection()
    sent: Any = send(connection, _insert_many(connection, task, calls, meta, ids)) or (None,) * 3
    status, enqueued_at, written = sent
    new = set(map(int, written.split(","))) if written else set()
    given = zip(ids or sorted(new), calls, strict=bool(ids or task.unique is None))
    return [Enqueued(id_, status, enqueued_at, call.unique) for id_, call in given if id_ in new]


def _insert_many(connection: Any, task: TaskFields, calls: Sequence[Call], meta: str, ids: Sequence[int]) -> str:
    """Return ``ENQUEUE_MANY`` for these calls. The columns in which they differ come from arrays."""
    row = Row(connection, task, calls[0], meta)
    arrays = {"args": f"[{','.join([call.args for call in calls])}]"}
    arrays["kwargs"] = f"[{','.join([call.kwargs for call in calls])}]"
    for column, name in (("lock_key", "lock"), ("group_key", "group"), ("fair_key", "fair"), ("unique_key", "unique")):
        if column in row.columns:
            # JSON, because PostgreSQL reads an array of texts more slowly.
            arrays[column] = json.dumps([getattr(call, name) for call in calls], ensure_ascii=False)
    quoted = dict(zip(arrays, literals(connection, arrays.values()), strict=True))
    functions = [
        f"jsonb_array_elements{'' if name in ('args', 'kwargs') else '_text'}({quoted[name]})" for name in arrays
    ]
    if ids:
        arrays = {"id": "", **arrays}
        functions.insert(0, f"unnest('{array_of_numbers(ids)}'::bigint[])")
    if task.after:
        row.columns |= {"waits_for": str(len(task.after)), "status": "'BLOCKED'"}
    row.columns |= {name: f"call.{name}" for name in arrays}
    return ENQUEUE_MANY.format(
        insert=row.select,
        arrays=", ".join(functions),
        names=", ".join(arrays),
        waiter=filled("{waiter}"),
        awaited=f"'{array_of_numbers(task.after)}'",
    )


def insert_at_key(using: str, task: TaskFields, call: Call, meta: str) -> tuple[Enqueued, bool]:
    """Write one call with a lock key.

    Also returns whether the call waits for another task whose end admits to the key. Then nothing else has to be done.
    """
    enqueued, other = insert_by(using, call.lock, at_key(using, task, call, meta))
    return enqueued, enqueued.status == TaskStatus.BLOCKED and is_alone(task) and other in ADMITTED


def at_key(using: str, task: TaskFields, call: Call, meta: str) -> str:
    """Return ``AT_KEY`` for a call."""
    connection = connection_for(using)
    connection.ensure_connection()
    row = Row(connection, task, call, meta, blocked_if="EXISTS (SELECT FROM other)")
    return AT_KEY.format(task=filled("{task}"), key=row.columns["lock_key"], insert=row.insert)


def insert_by(using: str, key: str | None, statement: str) -> tuple[Enqueued, Any]:
    """Write one call while no other transaction admits to its key. Also return the statement's answer about the key."""
    *row, said = send(connection_for(using), message(using, (LOCK_KEY, [key]), statement)) or ()
    return Enqueued(*row), said


def _after(seconds: float) -> str:
    return f"statement_timestamp() + make_interval(secs => {seconds!r})"
