"""Kept plans: planning a claim takes as long as running it.

Plans are kept only in a session that belongs to one worker. Behind a pooler the next user of the session would meet
our names and settings. A plan is kept for as long as the session lasts, so it has to stay right however much the table
grows. Therefore such a session reads tables by their indexes only, which is what all our statements are written for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from django_pglock.postgres.message import literals
from django_pglock.store.statements import OFF

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

#: Settings of such a session: what ``BY_INDEX`` sets, and what plans need that are made once.
_SETTINGS = f"""
SELECT {", ".join(f"set_config('{name}', 'off', false)" for name in (*OFF, "enable_seqscan"))},
       set_config('plan_cache_mode', 'force_generic_plan', false)
"""

# By session that keeps plans: the names of its prepared statements, by their text.
_prepared: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()


def keep_plans(connection: DatabaseWrapper) -> None:
    """Keep the plans of prepared statements in this session from now on."""
    with connection.cursor() as cursor:
        cursor.execute(_SETTINGS)
    _prepared[connection.connection] = {}


def kept(cursor: Any, statement: str, *values: str | int) -> str | None:
    """Return the text that executes a statement with a kept plan, or None in a session that keeps none.

    In the statement ``$1`` and so on stand for the values. Whatever differs from call to call, such as the name of a
    queue, has to be one of the values: each different statement stays in the memory of the server.
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
