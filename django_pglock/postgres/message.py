"""One message to the server on a Django connection: one or several statements without parameters.

Django's cursor takes more time than PostgreSQL needs for a lock. So a message is sent below it if only
Django's own code is between the caller and psycopg. Otherwise the message is sent through Django's cursor, so that code
that watches or changes statements gets these as well. Such code is, for example, a backend with its own cursor, as that
of django-tenants, the cursor of an APM, an execute wrapper, or a log of queries. psycopg's pipeline mode is another
case.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from types import FunctionType
from typing import TYPE_CHECKING, Any

import psycopg
from django.db.backends.utils import CursorWrapper
from psycopg import Error as PsycopgError
from psycopg.pq import Escaping, PipelineStatus

from django_pglock.postgres.connections import ensure_usable
from django_pglock.postgres.exchange import HAS_GENERATORS, exchange
from django_pglock.postgres.stopping import check, current_attempt, stopping_wrapper

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

#: The methods through which Django's connection makes a cursor.
CURSOR_METHODS = ("cursor", "_cursor", "create_cursor", "make_cursor", "make_debug_cursor", "_prepare_cursor")
#: Matches one statement of a message. Comments and quoted texts may contain semicolons.
_STATEMENT = re.compile(r"(?:/\*.*?\*/|'(?:[^']|'')*'|[^;])+", re.DOTALL)


def send(connection: DatabaseWrapper, statements: str) -> Sequence[Any] | None:
    """Send statements without parameters in one message. Errors are Django's.

    Returns the first row of the last answer that has rows, or None.
    """
    check()
    ensure_usable(connection)
    return send_in_session(connection, statements)


def send_in_session(connection: DatabaseWrapper, statements: str) -> Sequence[Any] | None:
    """Do the same as ``send``, for a caller that knows that the connection is open.

    It is sent in any case. An attempt that must end still has to free its locks.
    """
    connection.validate_no_broken_transaction()
    if not is_plain_django(connection):
        token = current_attempt.set(None)
        try:
            return _send_by_cursor(connection, statements)
        finally:
            current_attempt.reset(token)
    try:
        return exchange(connection.connection, statements)
    except PsycopgError:
        with connection.wrap_database_errors:
            raise


def literals(connection: DatabaseWrapper, values: Iterable[str | int | None]) -> tuple[str, ...]:
    """Quote texts by libpq's ``PQescapeLiteral``, in a tenth of the time of a cursor. Numbers need no quotes.

    None is NULL. The connection must be open.
    """
    quote = Escaping(connection.connection.pgconn).escape_literal
    return tuple(
        bytes(quote(value.encode())).decode()
        if isinstance(value, str)
        else "NULL"
        if value is None
        else str(int(value))
        for value in values
    )


def _send_by_cursor(connection: DatabaseWrapper, statements: str) -> Sequence[Any] | None:
    raw: Any = connection.connection
    if raw.pgconn.pipeline_status != PipelineStatus.OFF:
        return _send_in_pipeline(connection, raw, statements)
    row: Sequence[Any] | None = None
    with connection.cursor() as cursor:
        execute_text(cursor, statements)
        while True:
            if cursor.description:
                row = cursor.fetchone()
            if not cursor.nextset():
                return row


def _send_in_pipeline(connection: DatabaseWrapper, raw: Any, statements: str) -> Sequence[Any] | None:
    """Send one statement after the other, because in pipeline mode a message cannot have several statements.

    The end of the inner pipeline is a Sync. So the statements are one implicit transaction, as in a message, and their
    errors are raised here.
    """
    with connection.wrap_database_errors:
        cursors = []
        with raw.pipeline():
            for statement in _STATEMENT.findall(statements):
                cursors.append(connection.cursor())
                execute_text(cursors[-1], statement)
        rows = [cursor.fetchone() for cursor in cursors if cursor.description]
        return rows[-1] if rows else None


def execute_text(cursor: Any, statements: str) -> None:
    """Execute statements whose values are literals in their text."""
    # Other execute wrappers may add parameters. Then a percent sign in a text would count as a placeholder.
    if "%" in statements:
        cursor.execute(statements.replace("%", "%%"), ())
    else:
        cursor.execute(statements)


def is_plain_django(connection: Any) -> bool:
    """Return whether only Django's own code is between a statement and psycopg. The connection must be open."""
    raw = connection.connection
    return (
        HAS_GENERATORS
        and not connection.queries_logged
        and type(raw) is psycopg.Connection
        and _makes_djangos_cursors((type(connection), raw.cursor_factory, CursorWrapper.execute))
        and connection.__dict__.keys().isdisjoint(CURSOR_METHODS)
        and (
            # The only wrapper of this package would not change the statements that are sent here.
            not connection.execute_wrappers or connection.execute_wrappers == [stopping_wrapper]
        )
        and raw.pgconn.pipeline_status == PipelineStatus.OFF
    )


@lru_cache(maxsize=64)
def _makes_djangos_cursors(way: tuple[Any, Any, Any]) -> bool:
    """Return whether a backend's class makes cursors only by Django's own methods. Cached for each class."""
    backend, cursor, execute = way
    methods = [getattr(backend, name) for name in CURSOR_METHODS]
    is_djangos = cursor.__module__ == "django.db.backends.postgresql.base"
    return is_djangos and all(map(is_djangos_function, [*methods, execute]))


def is_djangos_function(function: Any) -> bool:
    """Return whether a function is Django's own, and not a wrapper around one of Django's."""
    while type(function) is FunctionType and function.__globals__["__name__"].startswith("django."):
        inner = function.__dict__.get("__wrapped__")
        if inner is None:
            return True
        function = inner
    return False
