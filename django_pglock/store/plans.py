"""Prepared statements with generic plans, because to plan a claim takes as long as to execute it.

Statements are prepared only in a session that belongs to one worker. Behind a pooler, the next client of the session
would find our prepared statements and settings. The server keeps a generic plan until the session ends. So the plan
must stay good however much the table grows. Therefore such a session reads tables only by their indexes. All our
statements are written for that.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from django.db import connections

from django_pglock.postgres.message import literals
from django_pglock.store.statements import OFF, bound, filled

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

#: Settings of such a session: those of ``BY_INDEX``, and the one that makes the server plan each statement only once.
_SETTINGS = f"""
SELECT {", ".join(f"set_config('{name}', 'off', false)" for name in (*OFF, "enable_seqscan"))},
       set_config('plan_cache_mode', 'force_generic_plan', false)
"""

# For each session that keeps plans: the names of its prepared statements by their text.
_prepared: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()


def keep_plans(connection: DatabaseWrapper) -> None:
    """Keep the plans of prepared statements in this session from now on."""
    with connection.cursor() as cursor:
        cursor.execute(_SETTINGS)
    _prepared[connection.connection] = {}


def run_by_plan(using: str, statement: str, *values: str | int | None) -> list[tuple[Any, ...]]:
    """Execute one statement as ``run`` does, but by its kept plan if this session keeps plans. Return its rows."""
    with connections[using].cursor() as cursor:
        if text := prepared(cursor, _preparable(statement), *values):
            cursor.execute(text)
        else:
            cursor.execute(filled(statement), values)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


def bound_by_plan(using: str, statement: str, *values: str | int | None) -> str:
    """Return a statement with its values, for a message: the EXECUTE of its kept plan if this session keeps plans."""
    with connections[using].cursor() as cursor:
        return prepared(cursor, _preparable(statement), *values) or bound(using, statement, values)


@lru_cache(maxsize=64)
def _preparable(statement: str) -> str:
    """Return a statement with the names of its tables, and with ``$1`` and so on in the place of its values."""
    numbers = count(1)
    return re.sub("%[s%]", lambda found: f"${next(numbers)}" if found[0] == "%s" else "%", filled(statement))


def prepared(cursor: Any, statement: str, *values: str | int | None) -> str | None:
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
