"""Questions to a Django connection: is it PostgreSQL, in a transaction, alive; and how its session is ended."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from django.db import connections
from django.utils.connection import ConnectionDoesNotExist
from psycopg import Error as PsycopgError
from psycopg.errors import InsufficientPrivilege, ReadOnlySqlTransaction
from psycopg.pq import TransactionStatus

from django_pglock.errors import ConfigurationError
from django_pglock.postgres.libpq import CANCEL_WITHIN

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

# RDHUP (Linux) reports the peer's end also while its last message is still unread.
_HANG_UP = getattr(select, "POLLHUP", 0) | getattr(select, "POLLERR", 0) | getattr(select, "POLLRDHUP", 0)
_IN_TRANSACTION = (TransactionStatus.INTRANS, TransactionStatus.INERROR)


def connection_for(using: str) -> DatabaseWrapper:
    """Return this thread's Django connection to the database alias ``using``.

    Raises ``ConfigurationError`` when the alias is not in ``DATABASES``, or not PostgreSQL through psycopg 3.
    """
    try:
        connection = cast("DatabaseWrapper", connections[using])
    except ConnectionDoesNotExist:
        known = ", ".join(sorted(connections.settings))
        raise ConfigurationError(f"DATABASES has no alias {using!r}. Its aliases: {known}.") from None
    if connection.vendor != "postgresql":
        raise ConfigurationError(
            f"Database {using!r} is {connection.vendor}, and django_pglock needs PostgreSQL. "
            "Name another alias with using=, DJANGO_PGLOCK['USING'] or the OPTIONS of TASKS."
        )
    return connection


def ensure_usable(connection: DatabaseWrapper) -> None:
    """Open the connection if it is not open, and open it again if Django's health check finds its session gone."""
    connection.close_if_health_check_failed()
    if connection.connection is None:
        connection.ensure_connection()


def in_transaction(connection: DatabaseWrapper) -> bool:
    """Say whether the caller is inside a transaction: ``atomic()``, autocommit off, or a BEGIN of the caller's own.

    The block that ``TestCase`` opens does not count, as it does not count for ``atomic(durable=True)``: code under test
    behaves as in production.
    """
    if not connection.in_atomic_block:
        raw: Any = connection.connection
        if raw is None:
            return not connection.settings_dict["AUTOCOMMIT"]
        return not connection.autocommit or raw.pgconn.transaction_status in _IN_TRANSACTION
    # The same test as durable=True makes: around a block of TestCase there are only blocks of TestCase.
    blocks: list[Any] = connection.atomic_blocks
    return not (blocks and blocks[-1]._from_testcase)


def in_test_case(connection: DatabaseWrapper) -> bool:
    """Say whether the only open transaction is the one that ``TestCase`` wraps around each test."""
    return connection.in_atomic_block and not in_transaction(connection)


def transaction_status(connection: DatabaseWrapper) -> TransactionStatus:
    """Return what libpq knows of the session's transaction, without asking the server."""
    raw: Any = connection.connection
    return TransactionStatus.UNKNOWN if raw is None else raw.pgconn.transaction_status


def has_session_ended(connection: DatabaseWrapper) -> bool:
    """Say whether the server has ended this session, without asking it.

    A server that shuts down, or a backend that was terminated, closes its end of the socket. A poll of the socket shows
    that in microseconds, long before the next statement would fail. False if the connection was never opened; true if
    libpq or Django has closed it after an error.
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


def close_unusable_connections(*, without: str) -> None:
    """Close this thread's connections that are broken, too old or ended, except for the one to an alias."""
    for connection in connections.all(initialized_only=True):
        if connection.alias != without:
            if connection.vendor == "postgresql" and has_session_ended(cast("DatabaseWrapper", connection)):
                connection.close()
            else:
                connection.close_if_unusable_or_obsolete()


def is_forbidden(error: BaseException) -> bool:
    """Say whether the role lacks a right for what the error is about."""
    return InsufficientPrivilege.sqlstate in (getattr(each, "sqlstate", None) for each in (error, error.__cause__))


def sqlstates_of(error: BaseException | None) -> Iterator[str]:
    """Yield the codes of the server's errors in the chain of an exception, the latest first."""
    # Causes may form a ring: an exception can be the cause of its own cause.
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if sqlstate := getattr(error, "sqlstate", None):
            yield sqlstate
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def is_read_only(error: BaseException | None) -> bool:
    """Say whether an exception comes from a session that may not write: of a standby, or of a primary that was one."""
    return any(each == ReadOnlySqlTransaction.sqlstate for each in sqlstates_of(error))


def backend_pid(connection: DatabaseWrapper) -> int:
    """Return the server process id as libpq knows it, without asking the server."""
    connection.ensure_connection()
    return int(connection.connection.info.backend_pid)


def statement_under_way(connection: DatabaseWrapper) -> bool:
    """Say whether another thread waits for an answer on this connection."""
    return transaction_status(connection) == TransactionStatus.ACTIVE


def shut_down_socket(connection: DatabaseWrapper) -> None:
    """End a session on which another thread waits for an answer: that thread gets an error. The server is not asked."""
    if connection.connection is not None:
        shut(connection.connection)


def shut(raw: Any) -> None:
    """End the session of a psycopg connection by its socket, because another thread may use libpq's connection now.

    The file descriptor stays open, so that a coroutine that waits for it is woken as well.
    """
    # An error means that the session has just ended by itself.
    with contextlib.suppress(OSError, PsycopgError), socket.socket(fileno=os.dup(raw.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def cancel_statement(connection: DatabaseWrapper) -> bool:
    """Cancel the statement that another thread runs on this connection, and say whether there was one.

    After the return, the cancel request cannot hit a later statement. Raises psycopg's errors when the server does not
    answer; then it could.
    """
    if not statement_under_way(connection):
        return False
    raw: Any = connection.connection
    raw.cancel_safe(timeout=CANCEL_WITHIN)
    return True


def end_session(connection: DatabaseWrapper) -> None:
    """End the session, also inside a transaction; the next statement opens another session.

    ``close()`` alone would give the session of a pool back to the pool, with everything that it holds, and would leave
    Django inside a transaction that nothing ends.
    """
    raw: Any = connection.connection
    if raw is not None:
        raw.pgconn.finish()
    connection.in_atomic_block = False
    connection.atomic_blocks = []
    connection.close()
