"""Services: the parts of the worker that run in their own threads.

Such a thread calls ``run_once()`` in a loop. One call is a pass. If a pass loses its database connection, the service
logs this once, closes the connection, backs off with jitter, and continues. A service sleeps only by waiting for an
event, so that a stop ends the sleep at once.

A service reports that it is alive, and when it will report next, so that ``probes/health.py`` can find out whether it
hangs.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psycopg
from django.db import InterfaceError, OperationalError, connections
from psycopg.pq import TransactionStatus

from django_pglock.error_reading import one_line
from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.connections import (
    CONNECTION_ERRORS,
    has_session_ended,
    has_statement_in_progress,
    is_forbidden,
    sqlstates_of,
    transaction_status,
)
from django_pglock.postgres.forking import ensure_own_session
from django_pglock.postgres.sessions import dedicated_connection, set_limits

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

logger = get_logger(WORKER)

#: Seconds before the first retry after a failed pass. Doubled each time, up to the second number.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0
#: The time limit for one statement of a service in seconds, unless the service sets another limit.
STATEMENT_TIMEOUT = 30.0

#: The first letters of SQLSTATEs by which the server refuses or ends a connection: errors of the connection, too few
#: resources, and an operator's intervention. Not 57014, the cancel of a statement.
CONNECTION_SQLSTATES = ("08", "53", "57P")

#: The server's limits for a statement, and for a session that is idle in a transaction. Services set their own values.
OWN_LIMITS = ("statement_timeout", "idle_in_transaction_session_timeout")
#: Limits that are switched off, because they would end a service's session in normal operation.
NO_LIMITS = {"lock_timeout": "0", "idle_session_timeout": "0", "transaction_timeout": "0"}


class Service:
    """One thread with a loop. A subclass defines a pass, and may define how to wake it and what to do at the end."""

    name = "service"

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failures = 0
        #: The error of the last pass; None if it had none.
        self.last_error: BaseException | None = None
        #: The moment, of time.monotonic(), until which the service reports again if it does not hang.
        self.next_report_by = math.inf

    @property
    def longest_pause(self) -> float:
        """The longest time in seconds between two passes after an error."""
        return LONGEST_PAUSE

    @property
    def has_connected(self) -> bool:
        """Whether the service has had a database session."""
        return True

    def start(self) -> None:
        """Start the thread. Call it once."""
        thread = threading.Thread(target=self._loop, name=f"lockworker-{self.name}", daemon=True)
        thread.start()
        # Set only now: before its start a thread is not alive, and another thread may check ``is_missing`` meanwhile.
        self._thread = thread

    def stop(self) -> None:
        """Request the end of the thread after its present pass. May be called twice, or before the start."""
        self.stopping.set()
        self.wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds for the end of the thread. Return whether it has ended."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_running(self) -> bool:
        """Whether the thread has been started and has not ended."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_missing(self) -> bool:
        """Whether the thread has ended without having been stopped."""
        return self._thread is not None and not self._thread.is_alive() and not self.stopping.is_set()

    def report_alive(self, sleep: float = 0.0) -> None:
        """Report that the service is alive. It may sleep or wait for ``sleep`` seconds before it reports again."""
        self.next_report_by = time.monotonic() + sleep

    def statement_in_progress(self) -> tuple[DatabaseWrapper, int] | None:
        """Return the session and the number of the statement that waits for its answer now. For other threads."""
        return None

    def wake(self) -> None:
        """End the sleep of the present pass. Override it if the service does not only wait for ``stopping``."""

    def open(self) -> None:
        """Open the session for a pass, unless it is open. Called before each pass."""

    def run_once(self) -> None:
        """Do the work once. Sleep at the end if there is nothing to do."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the session that a pass may have opened. Called after each failure."""

    def close_at_end(self) -> None:
        """Close the session of the passes. Called at the end."""
        self.close()

    def flush(self) -> None:
        """Do the remaining work after the last pass, in the same session. May fail."""

    def finish(self) -> None:
        """Close the resources that the service has used since its start."""

    def forbidden(self, error: BaseException) -> None:
        """Note that the role lacks a right. The service tries again in any case."""

    def _loop(self) -> None:
        try:
            while not self.stopping.is_set():
                self._run_once_or_back_off()
            self.flush()
        finally:
            self.close_at_end()
            self.finish()

    def _run_once_or_back_off(self) -> None:
        self.report_alive()
        try:
            self.open()
            self.run_once()
        except CONNECTION_ERRORS as error:
            self._back_off(error)
        except BaseException as error:  # the user's code may run here, and call sys.exit()
            logger.exception("The %s failed. It tries again.", self.name)
            self._back_off(error)
        else:
            if self._failures:
                logger.warning("The %s works again. Failed attempts: %d.", self.name, self._failures)
            self._failures, self.last_error = 0, None

    def _back_off(self, error: BaseException) -> None:
        self._failures += 1
        self.last_error = error
        if self._failures == 1:
            self._log_trouble(error)
        self.close()
        if is_forbidden(error):
            self.forbidden(error)
        bound = min(self.longest_pause, FIRST_PAUSE * 2 ** min(self._failures - 1, 10))
        self.report_alive(bound)
        self.stopping.wait(random.uniform(bound / 2, bound))  # noqa: S311

    def _log_trouble(self, error: BaseException) -> None:
        what = "cannot do its work"
        if _is_about_connection(error):
            what = "has lost its database connection" if self.has_connected else "cannot reach the database"
        logger.warning("The %s %s and tries again: %s", self.name, what, one_line(error))


def _is_about_connection(error: BaseException) -> bool:
    """Return whether an error is about the connection, and not about a statement that the server refuses or cancels."""
    if not isinstance(error, (OperationalError, InterfaceError, psycopg.OperationalError, OSError)):
        return False
    # An error of libpq has no SQLSTATE. A statement timeout, for example, is an OperationalError with another one.
    return all(state.startswith(CONNECTION_SQLSTATES) for state in sqlstates_of(error))


class ConnectedService(Service):
    """A service with a database session. It opens the session before the first pass, and again after each loss.

    The session is the thread's Django connection, so each query of this thread runs in it. Time limits that a database
    administrator has set for the role are switched off, because here an idle session is normal. The server cancels a
    statement that takes longer than ``statement_timeout`` seconds. If the server cannot be reached, ``Deadlines``
    closes the connection.

    Without ``sessions`` the service has its own session. Otherwise it takes one of ``sessions`` for each pass, and
    other services may use that session while this service waits.
    """

    #: If all sessions are in use, the service waits for this number of seconds before it opens another one.
    waits_for_session = 0.0

    def __init__(self, using: str, sessions: SharedSessions | None = None) -> None:
        super().__init__()
        self.using = using
        self.sessions = sessions
        self._connection: DatabaseWrapper | None = None
        # The same connection, but set already while the connection is being opened, because that also sends statements.
        self._awaited: DatabaseWrapper | None = None
        self._statements = 0
        # Whether the session was lost, or there was none yet. Then ``connected`` has to be called.
        self._is_cut_off = True
        self._connects = 0
        # Whether the service has released its session in the present pass.
        self._has_released = False

    @property
    def statement_timeout(self) -> float:
        """The time limit for one statement in seconds."""
        return STATEMENT_TIMEOUT

    @property
    def is_connected(self) -> bool:
        """Whether the service has a session, as far as it knows."""
        return self._connection is not None

    @property
    def has_connected(self) -> bool:
        return self._connects > 0

    @property
    def reconnects(self) -> int:
        """The number of sessions that were opened because an earlier one was lost."""
        return max(0, self._connects - 1)

    def open(self) -> None:
        self._has_released = False
        if self._connection is None:
            connection = self._take()
            if connection.connection is None:
                self._prepare(connection)
            self._connection = connections[self.using] = connection
            if self._is_cut_off:
                self._connects += 1
                self.connected()
                self._is_cut_off = False

    def _take(self) -> DatabaseWrapper:
        """Return a living session, or a session that is not open yet."""
        if self.sessions is None:
            connection = dedicated_connection(self.using, application_name=f"lockworker {self.name}")
        else:
            connection = self.sessions.take(self.waits_for_session)
            if has_session_ended(connection):
                self._lose(connection)
                connection = self.sessions.take()
        self._awaited = connection
        connection.execute_wrappers.append(self._count)
        return connection

    def _prepare(self, connection: DatabaseWrapper) -> None:
        # No limit here: the client's settings limit how long to wait for a server that does not answer.
        self.report_alive(math.inf)
        ensure_own_session(connection)
        self.report_alive()
        limit = f"{self.statement_timeout * 1000:.0f}ms"
        set_limits(connection, {**NO_LIMITS, **dict.fromkeys(OWN_LIMITS, limit)})
        if self.sessions is not None:
            self.sessions.prepare(connection)

    def release_session(self) -> None:
        """Let other services use a shared session. Call it before a wait. The next pass takes a session again."""
        if self.sessions is not None and self._connection is not None:
            connection, self._connection, self._awaited = self._connection, None, None
            connection.execute_wrappers.remove(self._count)
            del connections[self.using]
            self._has_released = True
            self.sessions.give_back(connection)

    def retake_session(self) -> None:
        """Take a session again in the same pass, if the service has released its session."""
        if self._has_released:
            self.open()

    def close_session(self) -> None:
        """Close a session that is not needed for some time. This is no loss. The next ``open()`` opens another one."""
        connection, self._connection, self._awaited = self._connection, None, None
        if connection is not None:
            connection.close()
            del connections[self.using]

    def close_at_end(self) -> None:
        self.release_session()
        self.close()

    def connected(self) -> None:
        """Prepare the work in a new session: the first session, or the next one after a loss."""

    def statement_in_progress(self) -> tuple[DatabaseWrapper, int] | None:
        connection, number = self._awaited, self._statements
        return (connection, number) if connection is not None and has_statement_in_progress(connection) else None

    def _count(self, execute: Callable[..., Any], *statement: Any) -> Any:
        self._statements += 1
        return execute(*statement)

    def close(self) -> None:
        connection, self._connection, self._awaited = self._awaited, None, None
        if connection is not None:
            self._lose(connection)

    def _lose(self, connection: DatabaseWrapper) -> None:
        self._is_cut_off = True
        connection.close()
        if self.sessions is not None:
            self.sessions.close_idle()


# The database sessions that the services of a worker share: one for an idle worker, one for each service under load.
#
# A service takes a session while it works, and gives it back before it waits. It gets the session that was given back
# last. So surplus sessions are not used, and after some seconds all of them but one are closed.


#: Seconds without use after which a session is closed if there is another one.
IDLE_TIMEOUT = 10.0


class SharedSessions:
    """The sessions of one database alias that several threads share. One thread at a time uses a session.

    ``prepare`` is called with each session right after it was opened, in the thread that has opened it.
    """

    def __init__(self, using: str, *, prepare: Callable[[DatabaseWrapper], None] = lambda _: None) -> None:
        self.using = using
        self.prepare = prepare
        # The unused sessions, and since when they are unused, in the order in which they were given back.
        self._idle: list[tuple[float, DatabaseWrapper]] = []
        self._changing = threading.Condition()
        self._is_closed = False

    def take(self, within: float = 0.0) -> DatabaseWrapper:
        """Return the session that was given back last or, if all are in use, a new one that is not open yet.

        ``within``: if all are in use, first wait up to this number of seconds for a session that is given back.
        """
        with self._changing:
            if self._idle or (within and self._changing.wait_for(lambda: self._idle, within)):
                return self._idle.pop()[1]
        return dedicated_connection(self.using, application_name="lockworker work")

    def give_back(self, session: DatabaseWrapper) -> None:
        """Let other threads use a session, and close the sessions that have not been used for long."""
        if transaction_status(session) != TransactionStatus.IDLE:
            session.close()
            return
        with self._changing:
            self._idle.append((time.monotonic(), session))
            self._changing.notify()
        if self._is_closed:
            self.close_idle()
        else:
            self.close_surplus()

    def close_surplus(self) -> None:
        """Close the sessions that have not been used for long, except for the last one."""
        with self._changing:
            last = time.monotonic() - IDLE_TIMEOUT
            # The list is in the order of the times.
            old = [each for each in self._idle[:-1] if each[0] <= last]
            self._idle = self._idle[len(old) :]
        for _, surplus in old:
            surplus.close()

    def close_idle(self) -> None:
        """Close the unused sessions: after the loss of one session, the others are probably lost as well."""
        with self._changing:
            idle, self._idle = self._idle, []
        for _, session in idle:
            session.close()

    def close(self) -> None:
        """Close the unused sessions now, and the others as soon as they are given back."""
        self._is_closed = True
        self.close_idle()
