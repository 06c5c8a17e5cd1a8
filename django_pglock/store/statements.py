"""Sends the statements of this folder, and has the fragments that several of them share.

Rules for all statements:

- ``{task}``, ``{attempt}`` and so on are placeholders for quoted table names. ``{expires_at}``, ``{by_index}``,
  ``{claim_columns}``, ``{next_attempt}`` and ``{in_order_of_keys}`` are placeholders for the fragments of these names.
  All values are parameters.
- Statuses are literals, so that a generic plan can use the partial indexes, too.
- Rows whose ids are known are selected by an array of the ids, also if there is a join. If all rows of a table had been
  deleted before its last VACUUM or ANALYZE, the planner expects one row in it, however many pages it has, until the
  next ANALYZE. To read all of it then seems as cheap as to look up one row. A join alone may read the whole table, for
  each row of the other table.
- For the same reason: a single row of another table is looked up by a subquery with LIMIT. EXISTS and NOT EXISTS are
  joins. The first or last id is found by ORDER BY with LIMIT. ``min`` and ``max`` may read all ids. A column that is
  searched alone, other than the id, must not also be the second column of another index. Otherwise the planner may read
  that whole index.
- ``status || ''`` instead of ``status`` keeps servers before PostgreSQL 17 from choosing an index on the status. They
  would read all rows of that status from it, and only then compare the ids.
- The running tasks of one worker are selected by ``worker BETWEEN id AND id``, in the order of the workers, and with
  ``BY_INDEX``. Only the index of running tasks has this order. With ``worker = id`` the planner could use any index. If
  the statistics were made while no task was running, it would read the running tasks of all workers.
- Times are the server's: ``statement_timestamp()`` if all rows need the same moment, otherwise ``clock_timestamp()``.
  Never ``now()``, which is the beginning of the transaction and may be long ago.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from django.db import connections
from django.db.models import BooleanField, F, Func, Value
from psycopg import ClientCursor

from django_pglock.errors import model_of
from django_pglock.postgres.connections import in_transaction, is_pooled
from django_pglock.postgres.message import literals
from django_pglock.tasks.states import TaskStatus

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

T = TypeVar("T")

#: In the order of the fields of ``Claim``, without the worker.
CLAIM_COLUMNS = (
    *("id", "attempts", "backend", "queue", "priority", "task_path", "args", "kwargs", "meta", "retries"),
    *("max_retries", "rescues", "run_after", "enqueued_at", "started_at", "last_attempted_at", "lock_key", "uncounted"),
)
#: These dates are returned as seconds since the epoch, because the server needs ten times as long to write a date. A
#: double is exact to the microsecond for the next two centuries. Python gets the double as text, because few of these
#: dates are ever read, and psycopg needs five times as long to convert it to a number.
DATES = ("run_after", "enqueued_at", "started_at", "last_attempted_at")
#: The largest ``attempts`` that a claim increases. A plain INSERT may write any number. If the claim of such a row
#: exceeded the type, the statement would fail again and again, and no other row of the queue could be claimed.
MOST_ATTEMPTS = 2**31 - 2
_NEXT_ATTEMPT = f"LEAST(attempts, {MOST_ATTEMPTS}) + 1"


def _claim_columns() -> str:
    """Return the columns of a claim as SQL. ``started_at`` is NULL for the first claim of a task, as most are."""
    columns = {name: f"task.{name}" for name in CLAIM_COLUMNS}
    columns["started_at"] = "NULLIF(task.started_at, task.last_attempted_at)"
    return ", ".join(
        f"date_part('epoch', {column})::text" if name in DATES else column for name, column in columns.items()
    )


#: The expiry date of a task that finishes now: ``keep_result`` seconds after its end, but not before the period of its
#: unique key is over. NULL without ``keep_result``.
EXPIRES_AT = """CASE WHEN keep_result IS NOT NULL
                           THEN GREATEST(clock_timestamp() + make_interval(secs => keep_result), unique_until) END"""

#: Settings, until the end of a transaction, that make the planner read an index in its order instead of sorting. While
#: the statistics do not contain a new backlog, the planner expects a few rows where there are a hundred thousand. JIT
#: is off as well: if a plan must sort nevertheless, its estimated cost is so high that servers before PostgreSQL 18
#: compile it, which takes a quarter of a second.
OFF = ("enable_sort", "enable_bitmapscan", "jit")
BY_INDEX = ", ".join(f"set_config('{name}', 'off', true)" for name in OFF)

#: The order in which each transaction takes unique keys, so that two transactions cannot deadlock. Shorter keys are
#: first. So keys that end in numbers are mostly in the order of the calls, and rows that are written one after the
#: other are close to each other in the indexes.
IN_ORDER_OF_KEYS = 'length(unique_key), unique_key COLLATE "C"'

#: Limits how long the following statements of a transaction wait for a lock. Returns the limit that there was before.
LIMIT_WAITS = "SELECT current_setting('lock_timeout'), set_config('lock_timeout', %s, true)"

#: The begin of a message that is a transaction of its own.
READ_COMMITTED = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"

#: The number of rows that one statement changes or reads, so that other transactions wait for them only briefly.
WINDOW = 5000
#: The largest number of tasks of one status, or of rows of a list, that are counted: ten million would take seconds.
MOST_COUNTED = 10_000

#: The tables that the statements name.
_TABLES = ("task", "attempt", "event", "number", "queue", "rate_limit", "schedule", "step", "waiter", "worker")
_QUOTED = '"%s"'


def rows_of(model: str, using: str) -> Any:
    """Return all rows of a model of this app in the database ``using``, as a queryset."""
    return model_of(model).objects.using(using)


#: A statement of a message: with its values, or a text that has them already.
Part = tuple[str, Sequence[Any]] | str
#: Sent first, these make the planner read the next statement's indexes in their order, whatever the statistics say.
IN_INDEX_ORDER = (f"SELECT {BY_INDEX}",)


def run(
    using: str, statement: str, *values: Any, prepared: bool = False, first: Sequence[Part] = ()
) -> list[tuple[Any, ...]]:
    """Execute a statement on this thread's connection. Return its rows.

    - ``prepared``: by its kept plan if this session keeps plans. Then the values are texts, ints and None.
    - ``first``: statements that are sent before it in the same message. Together they are one transaction, or a part of
      the open one.

    Between two messages the process may freeze. Then the rows that the first statement has locked would stay locked
    until the server ends the idle session. PostgreSQL executes a message as one transaction, with a new snapshot for
    each of its statements: https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-FLOW-MULTI-STATEMENT.
    """
    with connections[using].cursor() as cursor:
        text = _execute_of(cursor, _preparable(statement), *values) if prepared else None
        if first:
            cursor.execute(message(using, *first, text or (statement, values)))
            while cursor.nextset():
                pass
        elif text:
            cursor.execute(text)
        else:
            cursor.execute(filled(statement), values or None)
        # ``description`` would make an object of each column. In a pipeline of psycopg there is no result yet.
        result = cursor.pgresult
        return cursor.fetchall() if result is not None and result.nfields else []


def message(using: str, *parts: Part) -> str:
    """Return statements with their values as one message. The connection must be open.

    If the message is its own transaction, it is READ COMMITTED, whatever the role's default is. Only then each
    statement has its own snapshot.
    """
    connection: Any = connections[using]
    is_own = not connection.in_atomic_block and not in_transaction(connection)
    begin = [READ_COMMITTED] if is_own else []
    return ";".join(begin + [part if isinstance(part, str) else bound(using, *part) for part in parts])


def bound(using: str, statement: str, values: Sequence[Any]) -> str:
    """Return a statement with its values; ``%%`` becomes ``%``, also without values. The connection must be open."""
    return ClientCursor(connections[using].connection).mogrify(filled(statement), values)


@lru_cache(maxsize=256)
def filled(statement: str) -> str:
    """Return a statement with the names of its tables. PostgreSQL quotes them the same on each connection."""
    tables = {name: _QUOTED % model_of(name.replace("_", ""))._meta.db_table for name in _TABLES}
    return statement.format(
        **tables,
        claim_columns=_claim_columns(),
        next_attempt=_NEXT_ATTEMPT,
        expires_at=EXPIRES_AT,
        by_index=BY_INDEX,
        in_order_of_keys=IN_ORDER_OF_KEYS,
    )


def in_status(tasks: Any, status: str) -> Any:
    """Return those of the tasks that have this status. An index has them in the order of status and id."""
    if status == TaskStatus.SUCCESSFUL:
        # Most tasks have succeeded, so the planner soon finds them along the primary key.
        return tasks.filter(status=status)
    # The comment at COUNT_OTHERS in count.py says why a range.
    return tasks.filter(status__range=(status, status)).exclude(status=TaskStatus.SUCCESSFUL)


def is_among(ids: Iterable[int]) -> Func:
    """Return a condition: a row has one of these ids. As one array, because a parameter for each takes far longer."""
    template = "%(expressions)s::bigint[])"
    array = Value(array_of_numbers(ids))
    return Func(F("pk"), array, template=template, arg_joiner=" = ANY (", output_field=BooleanField())


def windows(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield a sequence in parts of some size, each of which is for one statement."""
    return (items[start : start + size] for start in range(0, len(items), size))


def array_of_numbers(numbers: Iterable[int]) -> str:
    """Return numbers as the text of an array. For many numbers this is many times faster than binding a list."""
    return "{" + str([*numbers])[1:-1] + "}"


def array_of_texts(texts: Iterable[str]) -> str:
    """Return texts as the text of an array: https://www.postgresql.org/docs/current/arrays.html#ARRAYS-IO."""
    escaped = (text.replace("\\", "\\\\").replace('"', '\\"') for text in texts)
    return "{" + ",".join(f'"{text}"' for text in escaped) + "}"


# Prepared statements with generic plans, because to plan a claim takes as long as to execute it.
#
# Statements are prepared only in a session that belongs to one worker. Behind a pooler, the next client of the session
# would find our prepared statements and settings. The server keeps a generic plan until the session ends. So the plan
# must stay good however much the table grows. Therefore such a session reads tables only by their indexes. All our
# statements are written for that.


#: Settings of such a session: those of ``BY_INDEX``, and the one that makes the server plan each statement only once.
_SETTINGS = f"""
SELECT {", ".join(f"set_config('{name}', 'off', false)" for name in (*OFF, "enable_seqscan"))},
       set_config('plan_cache_mode', 'force_generic_plan', false)
"""

# For each session that keeps plans: the names of its prepared statements by their text.
_prepared: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()


def keep_plans(connection: DatabaseWrapper) -> None:
    """Keep the plans of prepared statements in this session from now on, unless it belongs to a pooler."""
    if is_pooled(connection):
        return
    with connection.cursor() as cursor:
        cursor.execute(_SETTINGS)
    _prepared[connection.connection] = {}


def keeps_plans(using: str) -> bool:
    """Return whether this thread's session keeps plans, so that it belongs to one worker and not to a pooler."""
    return connections[using].connection in _prepared


@lru_cache(maxsize=64)
def _preparable(statement: str) -> str:
    """Return a statement with the names of its tables, and with ``$1`` and so on in the place of its values."""
    numbers = count(1)
    return re.sub("%[s%]", lambda found: f"${next(numbers)}" if found[0] == "%s" else "%", filled(statement))


def _execute_of(cursor: Any, statement: str, *values: str | int | None) -> str | None:
    """Return the EXECUTE of a prepared statement, and prepare it first if needed. None: this session keeps no plans.

    The statement has ``$1`` and so on in the place of the values. Everything that differs between calls, such as the
    name of a queue, must be a value, because the server keeps each different statement in its memory.
    """
    names = _prepared.get(cursor.connection)
    if names is None:
        return None
    if statement not in names:
        name = f"pglock_{len(names) + 1}"
        cursor.execute(f"PREPARE {name} AS {statement}")
        names[statement] = name
    given = f" ({', '.join(literals(cursor.db, values))})" if values else ""
    return f"EXECUTE {names[statement]}{given}"
