"""How the statements of this folder are sent, and the fragments that several of them share.

What holds for all of them:

- ``{task}``, ``{attempt}`` and so on stand for quoted table names, and ``{expires_at}``, ``{by_index}`` and
  ``{claim_columns}`` and ``{in_order_of_keys}`` for the fragments of these names. All values are parameters.
- Statuses are literals, so that a generic plan can use the partial indexes, too.
- Rows whose ids are known are selected by an array of the ids, also where there is a join. If a table was empty when it
  was last vacuumed, the planner expects one row in it, and a join alone may then read the whole table.
- ``status || ''`` instead of ``status`` keeps servers before PostgreSQL 17 from choosing an index on the status. They
  would read all rows of that status from it, and only then compare the ids.
- The running tasks of one worker are selected by ``worker BETWEEN`` it and itself, in the order of the workers, and
  with ``BY_INDEX``. Only the index of running tasks has this order. With ``worker =`` any order would do: where the
  statistics were made while nothing ran, the planner would read what runs on all workers from another index.
- Times are the server's: ``statement_timestamp()`` if all rows need the same moment, else ``clock_timestamp()``. Never
  ``now()``, which is the beginning of the transaction and may be long ago.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from django.apps import apps
from django.db import connections
from psycopg import ClientCursor

from django_pglock.store.claim_columns import claim_columns

#: When the row of a task that finishes now may be deleted: ``keep_result`` seconds after its end, but not before the
#: period of its unique key is over. NULL without ``keep_result``.
EXPIRES_AT = """CASE WHEN keep_result IS NOT NULL
                           THEN GREATEST(clock_timestamp() + make_interval(secs => keep_result), unique_until) END"""

#: Settings for the rest of a transaction that make the planner walk an index in its order instead of sorting. While
#: the statistics do not know of a backlog yet, the planner expects a few rows where there are a hundred thousand. JIT
#: is off as well: if a plan has to sort nevertheless, servers before PostgreSQL 18 take it for so expensive that they
#: compile it, which takes a quarter of a second.
OFF = ("enable_sort", "enable_bitmapscan", "jit")
BY_INDEX = ", ".join(f"set_config('{name}', 'off', true)" for name in OFF)

#: The order in which every transaction takes unique keys, so that no two deadlock. Shorter keys first: so keys that end
#: in numbers are mostly in the order of the calls, and rows that are written one after the other stand together in the
#: indexes.
IN_ORDER_OF_KEYS = 'length(unique_key), unique_key COLLATE "C"'

#: The models besides Task whose tables the statements name.
_OTHERS = (
    *("archived_task", "attempt", "failure_group", "queue", "queue_count", "rate_limit", "running_stack"),
    *("schedule", "task_history", "waiter", "worker"),
)
_QUOTED = '"%s"'


def rows_of(model: str, using: str) -> Any:
    """Return all rows of a model of this app in the database ``using``, as a queryset."""
    return apps.get_model("django_pglock", model).objects.using(using)


def run(using: str, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """Run one statement on this thread's connection; return its rows."""
    with connections[using].cursor() as cursor:
        cursor.execute(filled(statement), values or None)
        return cursor.fetchall() if cursor.description else []


def run_together(using: str, *parts: tuple[str, Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Run statements with their values as one transaction, or within the open one; return the rows of the last.

    They are sent in one message. Between two messages the process may freeze, and what the first statement has locked
    would stay locked for everybody until the server ends the idle session. PostgreSQL makes one transaction of a
    message and takes a new snapshot for each of its statements:
    https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-FLOW-MULTI-STATEMENT.
    """
    with connections[using].cursor() as cursor:
        cursor.execute(message(using, *parts))
        while cursor.nextset():
            pass
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


def run_by_index(using: str, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """Run one statement by the indexes in whose order it selects rows, whatever the statistics say; return its rows."""
    return run_together(using, (f"SELECT {BY_INDEX}", ()), (statement, values))


def message(using: str, *parts: tuple[str, Sequence[Any]]) -> str:
    """Return statements with their values as one message. The connection has to be open.

    A transaction of its own is READ COMMITTED, whatever the role's default is: only then has each statement a snapshot
    of its own.
    """
    begin = [] if connections[using].in_atomic_block else ["SET TRANSACTION ISOLATION LEVEL READ COMMITTED"]
    return ";".join(begin + [bound(using, statement, values) for statement, values in parts])


def bound(using: str, statement: str, values: Sequence[Any]) -> str:
    """Return a statement with its values. The connection has to be open."""
    return ClientCursor(connections[using].connection).mogrify(filled(statement), values or None)


@lru_cache(maxsize=256)
def filled(statement: str) -> str:
    """Return a statement with the names of its tables, which PostgreSQL quotes alike on every connection."""
    tables = {name: _QUOTED % _table_of(name.replace("_", "")) for name in ("task", *_OTHERS)}
    columns = claim_columns(_QUOTED.__mod__, "task.")
    return statement.format(
        **tables, claim_columns=columns, expires_at=EXPIRES_AT, by_index=BY_INDEX, in_order_of_keys=IN_ORDER_OF_KEYS
    )


def _table_of(model: str) -> str:
    return str(apps.get_model("django_pglock", model)._meta.db_table)


def array_of_numbers(numbers: Iterable[int]) -> str:
    """Return numbers as PostgreSQL writes an array. For long ones this is many times faster than binding a list."""
    return "{" + str([*numbers])[1:-1] + "}"
