"""What the rooms above need from a Django connection: is it PostgreSQL, in a transaction, alive; and a private one."""

from __future__ import annotations

import contextlib
import copy
import os
import select
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import django.db.backends.utils
from django.db import connections
from django.db.backends.utils import CursorWrapper
from django.utils.connection import ConnectionDoesNotExist
from django.utils.module_loading import import_string
from psycopg import Error as PsycopgError
from psycopg.pq import Escaping, TransactionStatus

from django_pglock.errors import ConfigurationError
from django_pglock.libpq import CAN_EXCHANGE, CANCEL_WITHIN, begin_for, exchange

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

# RDHUP (Linux) tells of the peer's end also while its last message is still unread.
_HANG_UP = getattr(select, "POLLHUP", 0) | getattr(select, "POLLERR", 0) | getattr(select, "POLLRDHUP", 0)


#: How long libpq waits on a silent network, where its own defaults are hours, or for ever: seconds to connect, seconds
#: and tries until an idle connection counts as lost, milliseconds until one does on which what was sent is not
#: acknowledged.
TIME_LIMITS = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}


SET_LIMITS = """
SELECT set_config(wanted.name, wanted.value, false)
FROM unnest(%s::text[], %s::text[]) AS wanted (name, value) JOIN pg_settings USING (name)
WHERE pg_backend_pid() = %s
"""


def connection_for(using: str) -> DatabaseWrapper:
    """Return this thread's Django connection to the database alias ``using``.

    Raises ``ConfigurationError`` when the alias is not in ``DATABASES``, or not PostgreSQL through psycopg 3.
    """
    try:
        connection: Any = connections[using]
    except ConnectionDoesNotExist:
        known = ", ".join(sorted(connections.settings))
        raise ConfigurationError(f"DATABASES has no {using!r}; it has {known}.") from None
    if connection.vendor != "postgresql":
        raise ConfigurationError(
            f"Database {using!r} is {connection.vendor}; django_pglock needs PostgreSQL. "
            "Name another alias with using=, DJANGO_PGLOCK['USING'] or the OPTIONS of TASKS."
        )
    return connection  # type: ignore[no-any-return]


def in_atomic(connection: DatabaseWrapper) -> bool:
    """Say whether the caller is inside ``atomic()``.

    The block that ``TestCase`` itself opens does not count, as it does not for ``atomic(durable=True)``: code under
    test behaves as in production.
    """
    if not connection.in_atomic_block:
        # With AUTOCOMMIT off, everything happens in transactions that the caller ends.
        return not connection.settings_dict["AUTOCOMMIT"]
    blocks = getattr(connection, "atomic_blocks", [])
    return not (blocks and all(getattr(block, "_from_testcase", False) for block in blocks))


def dedicated_connection(using: str, *, application_name: str | None = None) -> DatabaseWrapper:
    """Return a new, unshared Django connection to ``using``, outside every pool and never recycled by age.

    For those who must keep a session: a listener, a heartbeat, a session lock. The owner closes it.
    ``application_name`` is what ``pg_stat_activity`` shows.
    """
    settings = copy.deepcopy(connection_for(using).settings_dict)
    options = settings["OPTIONS"] = {**TIME_LIMITS, **settings["OPTIONS"]}
    options.pop("pool", None)
    if application_name is not None:
        options["application_name"] = application_name[:63]
    settings.update(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=False, ATOMIC_REQUESTS=False, AUTOCOMMIT=True)
    wrapper = import_string(f"{settings['ENGINE']}.base.DatabaseWrapper")
    connection: DatabaseWrapper = wrapper(settings, alias=using)
    connection.inc_thread_sharing()
    return connection


def limit_waiting(connection: DatabaseWrapper) -> None:
    """Let this Django connection not wait for a silent network for ever, where its settings do not say how long."""
    settings = connection.settings_dict
    connection.settings_dict = {**settings, "OPTIONS": {**TIME_LIMITS, **settings["OPTIONS"]}}


def set_limits(connection: DatabaseWrapper, limits: Mapping[str, str]) -> None:
    """Set settings of the server for this session, whatever the role, the database or the server say. One statement.

    Nothing is set that the server does not know, nor behind a pooler: there the next one in the session would have it.
    """
    with connection.cursor() as cursor:
        cursor.execute(SET_LIMITS, (list(limits), list(limits.values()), backend_pid(connection)))


def parameters_of(connection: DatabaseWrapper) -> dict[str, Any]:
    """Return how to connect as this Django connection does: what of it is text or a number, for another process."""
    parameters = connection.get_connection_params()
    return {name: value for name, value in parameters.items() if value is None or isinstance(value, str | int | float)}


def has_hung_up(connection: DatabaseWrapper) -> bool:
    """Say whether the server has ended this session, without asking it.

    A server that shuts down, or a backend that was terminated, closes its end of the socket, which a look at the
    socket shows in microseconds, long before the next statement would fail. A connection that was never opened has
    not hung up; one that libpq or Django has given up has.
    """
    raw: Any = connection.connection
    return bool(connection.closed_in_transaction) if raw is None else has_ended(raw)


def has_ended(raw: Any) -> bool:
    """Say of a psycopg connection whether its session has ended, without asking the server."""
    if raw.closed or raw.broken:
        return True
    if not hasattr(select, "poll"):  # Windows
        return False
    poll = select.poll()
    poll.register(raw.fileno(), _HANG_UP)
    return any(event & _HANG_UP for _, event in poll.poll(0))


def backend_pid(connection: DatabaseWrapper) -> int:
    """Return the server process id as libpq knows it, without asking the server."""
    connection.ensure_connection()
    return int(connection.connection.info.backend_pid)


def statement_under_way(connection: DatabaseWrapper) -> bool:
    """Say whether another thread waits for an answer on this connection."""
    raw: Any = connection.connection
    return raw is not None and raw.pgconn.transaction_status == TransactionStatus.ACTIVE


def hang_up(connection: DatabaseWrapper) -> None:
    """End a session under another thread that waits for its answer, without asking the server; that thread notices."""
    raw: Any = connection.connection
    # An error means that it has just ended by itself.
    with contextlib.suppress(OSError, PsycopgError, AttributeError), socket.socket(fileno=os.dup(raw.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def cancel_statement(connection: DatabaseWrapper) -> bool:
    """Have the statement cancelled that another thread runs on this connection, and say whether there was one.

    Once this has returned, the request cannot meet a later statement. Raises psycopg's errors when the server does not
    answer; then it could.
    """
    if not statement_under_way(connection):
        return False
    raw: Any = connection.connection
    raw.cancel_safe(timeout=CANCEL_WITHIN)
    return True


def send(connection: DatabaseWrapper, statements: str) -> Sequence[Any] | None:
    """Send statements without parameters in one message; return the first row of their last answer, or None.

    Errors are Django's. Django's cursor costs more time than PostgreSQL needs for a lock, so this goes below it; but
    whoever watches statements by Django's means (a log, an execute wrapper, a patched cursor) sees these as well.
    """
    connection.close_if_health_check_failed()
    if connection.connection is None:
        connection.ensure_connection()
    connection.validate_no_broken_transaction()
    raw: Any = connection.connection
    begin = begin_for(raw)
    if begin is None or not CAN_EXCHANGE or _is_watched(connection):
        return _send_by_cursor(connection, statements)
    try:
        return exchange(raw, begin + statements)
    except PsycopgError:
        with connection.wrap_database_errors:
            raise


def literals(connection: DatabaseWrapper, values: Iterable[str | int]) -> tuple[str, ...]:
    """Quote texts by libpq, whose ``PQescapeLiteral`` takes a tenth of the time of a cursor; numbers need no quotes.

    The connection has to be open.
    """
    quote = Escaping(connection.connection.pgconn).escape_literal
    return tuple(
        str(int(value)) if isinstance(value, int) else bytes(quote(value.encode())).decode() for value in values
    )


def _send_by_cursor(connection: DatabaseWrapper, statements: str) -> Sequence[Any] | None:
    with connection.cursor() as cursor:
        cursor.execute(statements)
        while cursor.nextset():
            pass
        row: Sequence[Any] | None = cursor.fetchone() if cursor.description else None
        return row


#: Execute wrappers of ours, which do nothing to the statements that are sent here.
OWN_WRAPPERS: list[Any] = []


def _is_watched(connection: DatabaseWrapper) -> bool:
    return bool(
        connection.queries_logged
        or "cursor" in connection.__dict__
        or CursorWrapper.execute.__globals__ is not _DJANGOS
        or (connection.execute_wrappers and connection.execute_wrappers != OWN_WRAPPERS)
    )


_DJANGOS = vars(django.db.backends.utils)
