"""How calls become rows: one INSERT for one call, and one for many.

An INSERT names only the columns whose values differ from their defaults. So the server plans no more than a call needs,
and a call without options costs as little as an INSERT by hand. All values are literals, because a message of several
statements has no parameters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from django_pglock.errors import TaskOptionError
from django_pglock.postgres.connections import connection_for
from django_pglock.postgres.message import execute_text, literals, send
from django_pglock.store.statements import array_of_numbers, filled, rows_of
from django_pglock.tasks.arguments import to_json
from django_pglock.tasks.options import HEADERS
from django_pglock.tasks.retry import duration

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

#: The largest number of calls in one statement, and the number of characters of arguments at which a statement is full.
BATCH, LARGEST_BATCH = 5000, 8_000_000


class Call(NamedTuple):
    """One call in the form in which it is written: JSON texts, and the keys that ``tasks/call_keys.py`` makes of them.

    It is one flat tuple, because the garbage collector visits each tuple of a hundred thousand calls several times.
    """

    args: str
    kwargs: str
    lock: str | None = None
    group: str | None = None
    fair: str | None = None
    unique: str | None = None


class Enqueued(NamedTuple):
    """The values that the server filled in when a task was enqueued; the date is seconds since the epoch.

    ``is_new`` is False if a unique task existed before the call.
    """

    id: int
    status: str
    enqueued_at: float
    unique_key: str | None = None
    is_new: bool = True


def batches(calls: Iterable[Call]) -> Iterator[list[Call]]:
    """Yield the calls in batches, in their order. Each batch is for one statement."""
    batch, size = [], 0
    for call in calls:
        batch.append(call)
        size += len(call.args) + len(call.kwargs)
        if len(batch) == BATCH or size > LARGEST_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def meta_of(task: TaskFields, headers: Mapping[str, Any] | None = None) -> str:
    """Return the JSON of the column ``meta``: the user's, the options that have no column, and headers."""
    meta = dict(task.meta)
    if task.carried:
        meta["options"] = task.carried
    if task.rate:
        meta["rate"] = [task.rate.interval, task.rate.portion]
    if task.redact:
        meta["redact"] = task.redact
    if task.on_failure:
        meta["on_failure"] = task.on_failure
    if task.after:
        meta["after"] = task.after
    if others := [each for each in task.after_ended if each not in task.after]:
        meta["after_ended"] = others
    if headers:
        meta[HEADERS] = headers
    return to_json(meta, what=f"The meta of {task.module_path}") if meta else "{}"


def due_of(task: TaskFields) -> tuple[datetime | None, timedelta | None]:
    """Return the date and the delay of a call; at least one of them is None."""
    due: Any = task.run_after
    if due is None and task.group is not None and task.group.seconds:
        due = timedelta(seconds=task.group.seconds)
    return (None, due) if isinstance(due, timedelta) else (due, None)


def is_alone(task: TaskFields) -> bool:
    """Return whether no other task of its lock key may run at the same time."""
    return (concurrency_of(task) or 1) == 1


def concurrency_of(task: TaskFields) -> int | None:
    """Return how many tasks of the lock key may run at once, or how many runs of the group; None: one."""
    if task.group is None or task.group.concurrency == 1:
        return task.concurrency
    return task.group.concurrency


_INSERT = (
    "INSERT INTO {task} ({names}) VALUES ({values}) {conflict}RETURNING id, status, date_part('epoch', enqueued_at)"
)

# Many calls of one task, which may differ in their arguments and keys. Ids are drawn from the sequence in the order of
# the rows, unless they were drawn before: then the rows can be written in the order of their unique keys. If two
# transactions wrote the same keys in different orders, they would deadlock. Returns one row, because each row of an
# answer costs time in the client. All tasks have the same status and date. Without ids, all calls were skipped.
ENQUEUE_MANY = """
WITH {awaited}new AS (
    INSERT INTO {task} ({columns}) SELECT {values}
    FROM ROWS FROM ({arrays}) WITH ORDINALITY AS call ({names}, number){condition}
    ORDER BY call.number
    ON CONFLICT DO NOTHING
    RETURNING id, status, enqueued_at
){waiters}
SELECT min(status), date_part('epoch', min(enqueued_at)), string_agg(id::text, ',' ORDER BY id) FROM new
"""

# The parts of ``ENQUEUE_MANY`` for calls that run after other tasks (``after=``, ``after_ended=``). Nothing is written
# if one of the other tasks does not exist. The new tasks are always BLOCKED. ``RELEASE`` changes their status later.
#
# The others are locked, because pruning skips locked rows. Before the commit of the new task, no other transaction can
# see that the new task waits for them. FOR KEY SHARE is the lock that a foreign key takes. It does not conflict with a
# claim or a settle, because those lock the row without its key. Pruning and deletion lock the key.
_AWAITED = """awaited AS MATERIALIZED (
    SELECT id FROM {task} WHERE id = ANY ('{ids}'::bigint[]) ORDER BY id FOR KEY SHARE
), """
_ALL_EXIST = " WHERE (SELECT count(*) FROM awaited) = {number}"
_WAITERS = """, waiters AS (
    INSERT INTO {waiter} (task_id, awaited, has_ended)
    SELECT new.id, awaited.id, CASE WHEN awaited.id <> ALL ('{after}'::bigint[]) THEN false END FROM new, awaited
)"""


def columns_of(connection: Any, task: TaskFields, call: Call, meta: str, *, ready_if: str = "") -> dict[str, str]:
    """Return the columns of a new row that differ from their defaults, each with its value as SQL.

    A task with a lock key is always BLOCKED first, and ``admit_one`` admits it right after the commit, unless
    ``ready_if`` is a condition. If each INSERT checked whether another task holds the key, transactions that enqueue
    tasks of one key would wait for each other.
    """
    own = {
        "args": call.args,
        # None: the default of the table.
        "kwargs": None if call.kwargs == "{}" else call.kwargs,
        "meta": None if meta == "{}" else meta,
        "lock_key": call.lock,
        "group_key": call.group,
        "fair_key": call.fair,
        "unique_key": call.unique,
    }
    columns = _same_columns(connection, task) | _quoted(connection, own)
    due = columns.get("run_after")
    if ready_if:
        columns["status"] = f"CASE WHEN {ready_if} THEN 'READY' ELSE 'BLOCKED' END"
    elif call.lock is not None:
        columns["status"] = "'BLOCKED'"
    if due is not None:
        otherwise = columns.get("status", "'READY'")
        columns["status"] = f"CASE WHEN {due} > statement_timestamp() THEN 'SCHEDULED' ELSE {otherwise} END"
    return columns


def _same_columns(connection: Any, task: TaskFields) -> dict[str, str]:
    """Return the columns that are the same for all calls of a task. They are computed for its first call."""
    columns: dict[str, str] | None = task.kept.get("columns")
    if columns is None:
        unique, kept = task.unique, task.keep_result
        own = {
            "queue": task.queue_name,
            "priority": task.priority,
            "task_path": task.module_path,
            "backend": task.backend,
            "max_retries": task.max_attempts - 1,
            "concurrency": concurrency_of(task),
            "unique_scope": None if unique is None else unique.scope.value,
            "keep_result": None if kept is None else int(duration("keep_result", kept)),
        }
        columns = _quoted(connection, own)
        if unique is not None and unique.seconds is not None:
            columns["unique_until"] = _after(unique.seconds)
        date, delay = due_of(task)
        if delay is not None:
            columns["run_after"] = _after(delay.total_seconds())
        elif date is not None:
            columns["run_after"] = f"'{date.isoformat()}'::timestamptz"
        task.kept["columns"] = columns
    return columns


def _quoted(connection: Any, columns: dict[str, Any]) -> dict[str, str]:
    given = {name: value for name, value in columns.items() if value is not None}
    return dict(zip(given, literals(connection, given.values()), strict=True))


def insert_of(columns: dict[str, str]) -> str:
    """Return the INSERT of one row."""
    conflict = "ON CONFLICT DO NOTHING " if "unique_key" in columns else ""
    names, values = ", ".join(columns), ", ".join(columns.values())
    return _INSERT.format(task=filled("{task}"), names=names, values=values, conflict=conflict)


def insert_calls(
    using: str, task: TaskFields, calls: Sequence[Call], meta: str, ids: Sequence[int] = ()
) -> list[Enqueued]:
    """Write calls by one statement. Return the rows in order, without the calls whose unique key is taken.

    ``ids``: one id for each call, drawn before, if the rows are to be written in another order than the calls.
    """
    connection = connection_for(using)
    connection.ensure_connection()
    if len(calls) == 1 and not task.awaited and not ids:
        row: Any = send(connection, insert_of(columns_of(connection, task, calls[0], meta)))
        return [Enqueued(row[0], row[1], row[2], calls[0].unique)] if row else []
    sent: Any = send(connection, insert_many(connection, task, calls, meta, ids))
    status, enqueued_at, written = sent
    if not written and task.awaited:
        _refuse_missing(using, task)
    new = set(map(int, written.split(","))) if written else set()
    given = zip(ids or sorted(new), calls, strict=bool(ids or task.unique is None))
    return [Enqueued(id_, status, enqueued_at, call.unique) for id_, call in given if id_ in new]


def insert_each(using: str, calls: Sequence[tuple[TaskFields, Call, str]]) -> list[Enqueued]:
    """Write one call, with its ``meta``, of each of several tasks by one statement. Return the rows in order.

    Not for unique tasks, and not for those that run after others.
    """
    connection = connection_for(using)
    connection.ensure_connection()
    rows = [columns_of(connection, *each) for each in calls]
    names = list(dict.fromkeys(name for columns in rows for name in columns))
    values = "), (".join(", ".join(columns.get(name, "DEFAULT") for name in names) for columns in rows)
    with connection.cursor() as cursor:
        execute_text(cursor, _INSERT.format(task=filled("{task}"), names=", ".join(names), values=values, conflict=""))
        # In the order of the values, on which Django's bulk_create() relies, too.
        return [Enqueued(*row) for row in cursor.fetchall()]


def insert_many(connection: Any, task: TaskFields, calls: Sequence[Call], meta: str, ids: Sequence[int] = ()) -> str:
    """Return ``ENQUEUE_MANY`` for these calls. The columns in which they differ come from arrays."""
    columns = columns_of(connection, task, calls[0], meta)
    arrays = {"args": f"[{','.join([call.args for call in calls])}]"}
    arrays["kwargs"] = f"[{','.join([call.kwargs for call in calls])}]"
    for column, name in (("lock_key", "lock"), ("group_key", "group"), ("fair_key", "fair"), ("unique_key", "unique")):
        if column in columns:
            # JSON, because PostgreSQL reads an array of texts more slowly.
            arrays[column] = json.dumps([getattr(call, name) for call in calls], ensure_ascii=False)
    functions = {
        name: f"jsonb_array_elements{'' if name in ('args', 'kwargs') else '_text'}({quoted})"
        for name, quoted in _quoted(connection, arrays).items()
    }
    if ids:
        functions = {"id": f"unnest('{array_of_numbers(ids)}'::bigint[])", **functions}
    awaited = task.awaited
    if awaited:
        columns |= {"waits_for": str(len(awaited)), "status": "'BLOCKED'"}
    columns |= {name: f"call.{name}" for name in functions}
    tables = {"task": filled("{task}"), "waiter": filled("{waiter}")}
    return ENQUEUE_MANY.format(
        **tables,
        columns=", ".join(columns),
        values=", ".join(columns.values()),
        arrays=", ".join(functions.values()),
        names=", ".join(functions),
        awaited=_AWAITED.format(**tables, ids=array_of_numbers(awaited)) if awaited else "",
        condition=_ALL_EXIST.format(number=len(awaited)) if awaited else "",
        waiters=_WAITERS.format(**tables, after=array_of_numbers(task.after)) if awaited else "",
    )


def _refuse_missing(using: str, task: TaskFields) -> None:
    """Raise ``TaskOptionError`` if a task of ``after=`` or ``after_ended=`` does not exist."""
    there = rows_of("Task", using).in_bulk(task.awaited)
    for option, named in (("after", task.after), ("after_ended", task.after_ended)):
        if missing := [str(each) for each in named if each not in there]:
            text = f"{option} of {task.module_path} names a task that does not exist: {', '.join(missing)}."
            raise TaskOptionError(text)


def _after(seconds: float) -> str:
    return f"statement_timestamp() + make_interval(secs => {seconds!r})"
