"""The Django connections of the threads that run tasks: prepares, checks and closes them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import connections
from django.db.backends.signals import connection_created
from psycopg import Error as PsycopgError
from psycopg.errors import CannotConnectNow, CrashShutdown
from psycopg.pq import TransactionStatus

from django_pglock.locks.session_locks import holds_locks
from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.connections import (
    access_of,
    end_session,
    has_session_ended,
    has_statement_in_progress,
    is_on_standby,
    shut_down_socket,
    sqlstates_of,
)
from django_pglock.postgres.sessions import limit_waiting
from django_pglock.postgres.stopping import install_if_in_task, install_wrapper

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

T = TypeVar("T")
logger = get_logger(WORKER)

#: Seconds between two checks of a thread's connections while its tasks succeed. A check costs as much as a small task.
CHECK_INTERVAL = 0.1
#: Seconds without a task after which a thread closes its connections.
IDLE_TIMEOUT = 60.0
#: Seconds for which a busy thread keeps a connection, also if CONN_MAX_AGE is less. With 0, Django's default, each
#: check would close the connection. To open the next one takes as long as a small task.
LEAST_AGE = 10.0
#: The server ends a session with these codes because another session has crashed, or because it stops.
ENDED_BY_OTHERS = (CrashShutdown.sqlstate, CannotConnectNow.sqlstate)
#: The attribute of psycopg's connection with the notices of such an end.
_CRASHES = "_django_pglock_crashes"
#: The attribute of a session that no statement has used since the end of the last task.
_OF_EARLIER_TASK = "_django_pglock_of_earlier_task"
#: The attribute of psycopg's connection with the number of its socket, and the connections that have lost theirs.
_SOCKET = "_django_pglock_socket"
_without_socket: list[Any] = []


def prepare_connections() -> None:
    """Let tasks be stopped at the statements of this thread's connections. Limit and watch the waits for the server."""
    connection_created.connect(install_if_in_task, dispatch_uid="django_pglock.stopping")
    connection_created.connect(_note_session, dispatch_uid="django_pglock.crashes")
    for alias in connections:
        # If the connection of an alias cannot be made, the error is raised where it is used.
        with contextlib.suppress(Exception):
            connection: Any = connections[alias]
            install_wrapper(connection)
            if connection.vendor == "postgresql":
                limit_waiting(connection)
                # Django calls this before each statement, with CONN_HEALTH_CHECKS or without.
                connection.close_if_health_check_failed = partial(_close_if_ended, connection)


def _note_session(connection: Any, **kwargs: Any) -> None:
    """Note on a new session which socket it has, and from now on whether the server ends it because of another one.

    If one session crashes, the server tells all others.
    """
    raw = connection.connection
    if connection.vendor == "postgresql" and not hasattr(raw, _CRASHES):
        crashes: list[bool] = []
        # The pool of another package may lend an object without attributes and handlers.
        with contextlib.suppress(AttributeError):
            setattr(raw, _SOCKET, _socket_of(raw))
            setattr(raw, _CRASHES, crashes)
            raw.add_notice_handler(lambda notice: crashes.extend([True] * (notice.sqlstate in ENDED_BY_OTHERS)))


def was_ended_by_others(raw: Any, error: BaseException) -> bool:
    """Return whether the server or a pooler says that another session has ended this one, of psycopg."""
    codes = list(sqlstates_of(error))
    if getattr(raw, _CRASHES, ()):
        return True
    # A pooler adds an error of its own to the one of the server, which may say that the task has exceeded a limit.
    return bool(codes) and all(code in ENDED_BY_OTHERS or code.startswith("08") for code in codes)


def _socket_of(raw: Any) -> int | None:
    with contextlib.suppress(OSError, PsycopgError):
        return os.fstat(raw.fileno()).st_ino
    return None


def _forget_without_socket(session: Any) -> None:
    """Forget the connection of a session whose file descriptor a task has closed.

    It is never deleted: libpq would close the descriptor of this number, which may be another's by now.
    """
    raw = session.connection
    noted = getattr(raw, _SOCKET, None)
    if noted is not None and not raw.closed and noted != _socket_of(raw):
        _without_socket.append(raw)
        session.connection = None


def expect_next_task(session: Any) -> None:
    """Note that the next statement on this Django connection is the first one of another task."""
    session.__dict__[_OF_EARLIER_TASK] = True


def _close_if_ended(session: Any) -> None:
    """Close a session of an earlier task that has ended, before the first statement of the next task.

    An earlier task may have ended it, or the server, in the moment since the last ``renew_connections``. That is not
    the failure of the next task, which gets another session. Only the socket is read.
    """
    if session.__dict__.pop(_OF_EARLIER_TASK, False) and not session.in_atomic_block:
        _forget_without_socket(session)
        if session.connection is not None and has_session_ended(session):
            session.close()
    type(session).close_if_health_check_failed(session)


def renew_connections(using: str) -> None:
    """Close this thread's connections that are broken, too old or ended, so that the next task opens new ones.

    Also close the connection to the tasks' database, ``using``, if it leads to a standby: after a failover, the address
    may have led to the standby for a while.
    """
    connection: Any
    for connection in connections.all(initialized_only=True):
        if not connection.in_atomic_block:
            _forget_without_socket(connection)
        if connection.vendor == "postgresql" and has_session_ended(connection):
            connection.close()
        elif connection.alias == using and is_reusable(connection) and is_on_standby(connection):
            end_session(connection)
        else:
            _close_if_unusable_or_old(connection)


def _close_if_unusable_or_old(connection: Any) -> None:
    """Do what Django does at the end of a request, but keep the connection for ``LEAST_AGE`` seconds."""
    due = connection.close_at
    if due is not None:
        connection.close_at = due + max(0.0, LEAST_AGE - connection.settings_dict["CONN_MAX_AGE"])
    connection.close_if_unusable_or_obsolete()
    # A function of the project may call close_old_connections().
    connection.close_at = due


def leave_read_only_sessions(using: str) -> bool:
    """End the sessions of this thread that can only read. Return whether that to ``using`` led to a standby.

    To be called after an error of such a session, which does not say which one it was. In the thread of the ORM, an
    open transaction may be another coroutine's, so a session with one stays until its owner ends.
    """
    session: Any
    was_on_standby = False
    for session in connections.all(initialized_only=True):
        # The function may have closed its session after the error. A new one leads to the same server, most probably.
        if session.vendor == "postgresql" and (session.connection is not None or session.alias == using):
            access = access_of(session)
            if session.alias == using:
                was_on_standby = access.is_standby
            if access.is_read_only and is_reusable(session):
                # Not by close(), which would give the session of a pool to the next task.
                end_session(session)
    return was_on_standby


def wait_for_call(inbox: SimpleQueue[T]) -> T:
    """Wait for what comes next and return it. After a while, close the connections of this thread."""
    with contextlib.suppress(Empty):
        return inbox.get(timeout=IDLE_TIMEOUT)
    close_idle_connections()
    return inbox.get()


def close_idle_connections() -> None:
    """Close the connections of this thread, but not those that hold a session lock."""
    connection: Any
    for connection in connections.all(initialized_only=True):
        _forget_without_socket(connection)
        if connection.connection is None or connection.vendor != "postgresql" or not holds_locks(connection):
            # An error has no effect, because the next task gets a new connection.
            with contextlib.suppress(Exception):
                connection.close()


def is_kept(settings: Mapping[str, Any]) -> bool:
    """Return whether a thread keeps a connection with these settings from one task to the next.

    It does not keep a connection of a pool, because the pool may have fewer connections than there are threads.
    """
    return not settings["OPTIONS"].get("pool")


def close_unkept_connections() -> None:
    """Return this thread's connections that come from pools."""
    for connection in connections.all(initialized_only=True):
        if not is_kept(connection.settings_dict):
            connection.close()


def is_reusable(session: DatabaseWrapper) -> bool:
    """Return whether the next task may use a session as it is. The session may belong to any kind of database.

    Not if a transaction is open. Without AUTOCOMMIT, each statement opens one.
    """
    raw: Any = session.connection
    if raw is None:
        # Without AUTOCOMMIT, Django stays in the block of a function that has closed the session in atomic(). It would
        # open no other one in the block.
        return not session.in_atomic_block
    has_autocommit = session.settings_dict["AUTOCOMMIT"]
    if session.in_atomic_block or session.autocommit is not has_autocommit:
        return False
    if session.vendor != "postgresql":
        return bool(has_autocommit)
    # A closed session is neither idle nor in a transaction.
    return bool(raw.pgconn.transaction_status == TransactionStatus.IDLE)


def end_transaction(session: DatabaseWrapper) -> None:
    """Close a session of this thread in which a transaction may be open, or whose connection may be in use."""
    # Inside of an atomic block close() only notes that it was called.
    session.in_atomic_block = session.closed_in_transaction = False
    if has_statement_in_progress(session):
        # Another thread waits for an answer on this connection. It would crash if libpq's connection were freed.
        shut_down_socket(session)
        session.connection = None
    else:
        session.close()


@contextlib.contextmanager
def ends_transactions_of(receivers: str) -> Iterator[None]:
    """End the transactions that signal receivers leave open here: what follows would be a part of them.

    In a ``TestCase`` that of the test was open before.
    """
    before = _unusable_sessions()
    yield
    for session in _unusable_sessions():
        if session not in before:
            logger.warning(
                "A receiver of %s has left a transaction open, or autocommit off, in database %r. Its uncommitted "
                "changes are rolled back.",
                receivers,
                session.alias,
            )
            end_transaction(session)


def _unusable_sessions() -> list[DatabaseWrapper]:
    sessions: Any = connections.all(initialized_only=True)
    return [each for each in sessions if not is_reusable(each)]


def is_closed(session: DatabaseWrapper) -> bool:
    """Return whether psycopg's connection was closed without Django's knowledge."""
    return session.vendor == "postgresql" and session.connection is not None and bool(session.connection.closed)
