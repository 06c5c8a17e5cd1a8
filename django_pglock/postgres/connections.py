"""The state of a Django connection: PostgreSQL or not, in a transaction, alive. How to end its session, and to wait."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from django.db import DatabaseError, InterfaceError, connections, transaction
from django.db import Error as DatabaseFailure
from django.utils.connection import ConnectionDoesNotExist
from psycopg import Error as PsycopgError
from psycopg.errors import InsufficientPrivilege, ReadOnlySqlTransaction
from psycopg.pq import TransactionStatus

from django_pglock.error_reading import following
from django_pglock.errors import ConfigurationError
from django_pglock.postgres.exchange import CANCEL_WITHIN

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

#: The errors that a statement, or an attempt to connect, may raise without a defect of the code.
CONNECTION_ERRORS = (DatabaseError, InterfaceError, PsycopgError, OSError)

# RDHUP (Linux) reports that the peer has closed the connection, also while its last message is still unread. NVAL
# reports that somebody in this process has closed the file descriptor.
_CLOSED_EVENTS = sum(getattr(select, each, 0) for each in ("POLLHUP", "POLLERR", "POLLRDHUP", "POLLNVAL"))
_IN_TRANSACTION = (TransactionStatus.INTRANS, TransactionStatus.INERROR)


def pause_after(failures: int, first: float = 0.1, longest: float = 3.0) -> float:
    """Return the seconds to wait after a number of failures in a row: doubled each time, with jitter."""
    bound = min(longest, first * 2.0 ** min(failures - 1, 10))
    return random.uniform(bound / 2, bound)  # noqa: S311


def connection_for(using: str) -> DatabaseWrapper:
    """Return this thread's Django connection to the database alias ``using``.

    Raises ``ConfigurationError`` if the alias is not in ``DATABASES``, or is not PostgreSQL with psycopg 3.
    """
    try:
        if not isinstance(using, str):
            raise ConnectionDoesNotExist  # noqa: TRY301 - Django's own error would not name the alias
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
    """Open the connection if it is not open, or if Django's health check finds that its session has ended."""
    connection.close_if_health_check_failed()
    if connection.connection is None:
        connection.ensure_connection()


def in_transaction(connection: DatabaseWrapper) -> bool:
    """Return whether the caller is inside a transaction: ``atomic()``, autocommit off, or its own BEGIN.

    The block that ``TestCase`` opens does not count, so that code under test behaves as in production.
    ``atomic(durable=True)`` ignores this block, too.
    """
    if not connection.in_atomic_block:
        raw: Any = connection.connection
        if raw is None:
            return not connection.settings_dict["AUTOCOMMIT"]
        return not connection.autocommit or raw.pgconn.transaction_status in _IN_TRANSACTION
    # The same check as for durable=True: around a block of TestCase there are only blocks of TestCase.
    blocks: list[Any] = connection.atomic_blocks
    return not (blocks and blocks[-1]._from_testcase)


def in_test_case(connection: DatabaseWrapper) -> bool:
    """Return whether the only open transaction is the one that ``TestCase`` wraps around each test."""
    return connection.in_atomic_block and not in_transaction(connection)


def has_commit_hooks(connection: Any) -> bool:
    """Return whether a block of ``atomic()`` is open after whose commit Django calls functions.

    With autocommit off, a block does not commit at its end, and Django calls no function after the caller's commit.
    """
    return bool(connection.in_atomic_block and connection.commit_on_exit)


def has_manual_transaction(connection: Any) -> bool:
    """Return whether the caller commits the open transaction itself: autocommit off, or its own BEGIN.

    With autocommit off, the transaction counts as open before its first statement, which begins it on the server.
    """
    if has_commit_hooks(connection):
        return False
    if connection.connection is None:
        # The next session will have this setting, whatever set_autocommit() has set before.
        return not connection.settings_dict["AUTOCOMMIT"]
    if not connection.autocommit:
        return True
    return connection.vendor == "postgresql" and transaction_status(connection) in _IN_TRANSACTION


def manual_transactions() -> Iterator[str]:
    """Yield the aliases of the databases with a transaction that this thread commits itself.

    One that this thread has not used yet counts, too, if DATABASES turns its autocommit off.
    """
    return (connection.alias for connection in connections.all() if has_manual_transaction(connection))


@contextlib.contextmanager
def transaction_block(using: str) -> Iterator[None]:
    """Execute the block as one transaction, or as a savepoint in the open one, also after a BEGIN of the caller.

    Django does not know of such a BEGIN: ``atomic()`` would send another one, and psycopg refuses this.
    """
    connection: Any = connections[using]
    is_unknown = (
        not connection.in_atomic_block and connection.autocommit and transaction_status(connection) in _IN_TRANSACTION
    )
    if not is_unknown:
        with transaction.atomic(using=using):
            yield
        return
    # With autocommit off, a block of atomic() is a savepoint, and Django does not commit at its end. Only Django's note
    # is changed, not the session.
    connection.autocommit = False
    try:
        with transaction.atomic(using=using):
            yield
    finally:
        connection.autocommit = True
        # If the savepoint fails, or if the session has ended, Django would stay in the block.
        connection.in_atomic_block = False


def transaction_status(connection: DatabaseWrapper) -> TransactionStatus:
    """Return libpq's status of the session's transaction, without a query."""
    raw: Any = connection.connection
    return TransactionStatus.UNKNOWN if raw is None else raw.pgconn.transaction_status


def has_session_ended(connection: DatabaseWrapper) -> bool:
    """Return whether the server has ended this session, without a query.

    A server that shuts down, or a backend that was terminated, closes its end of the socket. A poll of the socket finds
    this in microseconds, before the next statement fails. False if the connection was never opened. True if libpq or
    Django has closed it after an error.
    """
    raw: Any = connection.connection
    return bool(connection.closed_in_transaction) if raw is None else has_ended(raw)


def has_ended(raw: Any) -> bool:
    """Return whether the session of a psycopg connection has ended, without a query."""
    try:
        if raw.closed or raw.broken:
            return True
    except AttributeError:
        # The pool of another package has lent this object instead of psycopg's, and its session is back in the pool.
        return True
    if not hasattr(select, "poll"):  # Windows
        return False
    poll = select.poll()
    poll.register(raw.fileno(), _CLOSED_EVENTS)
    return any(event & _CLOSED_EVENTS for _, event in poll.poll(0))


def close_unusable_connections(*, without: str) -> None:
    """Close this thread's connections that are broken, too old or ended, except for the one to an alias.

    In a block of ``atomic()``, such as that of a ``TestCase``, a connection stays open.
    """
    for connection in connections.all(initialized_only=True):
        if connection.alias != without and not connection.in_atomic_block:
            if connection.vendor == "postgresql" and has_session_ended(cast("DatabaseWrapper", connection)):
                connection.close()
            else:
                connection.close_if_unusable_or_obsolete()


def sqlstates_of(error: BaseException | None) -> Iterator[str]:
    """Yield the codes of the server's errors in the chain of an exception, the latest first."""
    # Causes may be a circle: an exception can be the cause of its own cause.
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        # The attributes of other exceptions may raise.
        if isinstance(error, PsycopgError) and error.sqlstate:
            yield error.sqlstate
        seen.add(id(error))
        error = following(error)


def is_forbidden(error: BaseException) -> bool:
    """Return whether an exception reports that the role lacks a right."""
    return any(each == InsufficientPrivilege.sqlstate for each in sqlstates_of(error))


def is_read_only(error: BaseException | None) -> bool:
    """Return whether an exception comes from a read-only session: of a standby, or of a former primary."""
    return any(each == ReadOnlySqlTransaction.sqlstate for each in sqlstates_of(error))


def backend_pid(connection: DatabaseWrapper) -> int:
    """Return libpq's process id of the server, without a query."""
    connection.ensure_connection()
    return int(connection.connection.info.backend_pid)


def is_pooled(connection: DatabaseWrapper) -> bool:
    """Return whether a pooler such as PgBouncer is between, by a query. Its mode cannot be seen from here.

    In transaction mode other clients get the session, with all its settings, prepared statements and notifications.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return bool(cursor.fetchone() != (backend_pid(connection),))


def has_statement_in_progress(connection: DatabaseWrapper) -> bool:
    """Return whether another thread waits for an answer on this connection."""
    return transaction_status(connection) == TransactionStatus.ACTIVE


def shut_down_socket(connection: DatabaseWrapper) -> None:
    """End a session on which another thread waits for an answer, without a query. That thread gets an error."""
    if connection.connection is not None:
        shut(connection.connection)


def shut(raw: Any) -> None:
    """Shut the socket of a psycopg connection down, because another thread may use libpq's connection now.

    The file descriptor stays open, so that a coroutine that waits for it is woken as well.
    """
    # An error means that the session has just ended.
    with contextlib.suppress(OSError, PsycopgError), socket.socket(fileno=os.dup(raw.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def cancel_statement(connection: DatabaseWrapper) -> bool:
    """Cancel the statement that another thread executes on this connection. Return whether there was one.

    After the return, the cancel request cannot cancel a later statement. Raises psycopg's errors if the server does not
    answer. Then it still could.
    """
    if not has_statement_in_progress(connection):
        return False
    raw: Any = connection.connection
    raw.cancel_safe(timeout=CANCEL_WITHIN)
    return True


def end_session(connection: DatabaseWrapper) -> None:
    """End the session, also inside a transaction. The next statement opens another session.

    ``close()`` alone would return the session of a pool to the pool, with its locks and transaction, and Django would
    stay in a transaction that never ends.
    """
    raw: Any = connection.connection
    if raw is not None:
        raw.pgconn.finish()
    leave_blocks(connection)
    connection.close()


def leave_blocks(connection: DatabaseWrapper) -> None:
    """Make Django leave all blocks of ``atomic()``, whose session has ended. Otherwise it would never open another."""
    connection.in_atomic_block = False
    connection.atomic_blocks = []


# Whether a session leads to a standby, or may only read.
#
# From PostgreSQL 14 on, a server reports ``in_hot_standby`` to each session, and libpq keeps the last report. A pooler
# such as PgBouncer passes on what the first server behind it has reported, also when another server has taken over. So
# the report alone proves nothing, and the server is asked.


READ_ACCESS = "SELECT pg_is_in_recovery(), current_setting('transaction_read_only')::boolean"


class Access(NamedTuple):
    """What a session may do: whether its server is a standby, and whether its transactions can only read."""

    is_standby: bool
    is_read_only: bool


def access_of(connection: DatabaseWrapper) -> Access:
    """Ask the server what this session may do. A session that is closed is opened.

    A session that is lost counts as one on a standby: in a failover, sessions to both servers end.
    """
    if transaction_status(connection) == TransactionStatus.INERROR:
        if connection.settings_dict["AUTOCOMMIT"] or connection.in_atomic_block:
            # No question can be asked, and the transaction is not ours to end.
            return Access(*2 * [reports_standby(connection)])
        connection.rollback()
    try:
        with connection.cursor() as cursor:
            cursor.execute(READ_ACCESS)
            return Access(*cursor.fetchone())
    except DatabaseFailure:
        is_lost = connection.connection is None or has_session_ended(connection)
        return Access(is_lost, is_lost)


def is_on_standby(connection: DatabaseWrapper) -> bool:
    """Return whether the server of this open session is a standby. It is asked only if libpq has such a report."""
    return reports_standby(connection) and access_of(connection).is_standby


def reports_standby(connection: DatabaseWrapper) -> bool:
    """Return whether libpq has the report that the server of this session is a standby."""
    raw: Any = connection.connection
    return raw is not None and not raw.closed and raw.pgconn.parameter_status(b"in_hot_standby") == b"on"
