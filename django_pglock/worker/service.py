"""Services: the parts of the worker that run in their own threads.

Such a thread calls ``run_once()`` in a loop. One call is a pass. If a pass loses its database connection, the service
logs this once, closes the connection, backs off with jitter, and continues. A service sleeps only by waiting for an
event, so that a stop ends the sleep at once.

A service reports that it is alive, and when it will report next, so that others can find out whether it hangs.
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

from django_pglock.error_reading import one_line
from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.connections import (
    CONNECTION_ERRORS,
    connection_for,
    has_statement_in_progress,
    is_forbidden,
    shut_down_socket,
    sqlstates_of,
)
from django_pglock.postgres.forking import ensure_own_session
from django_pglock.postgres.sessions import dedicated_connection, set_limits
from django_pglock.store.statements import keep_plans

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

logger = get_logger(WORKER)

#: Seconds before the first retry after a failed pass. Doubled each time, up to the second number.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0
#: The time limit for one statement of a service in seconds, unless the service sets another limit. And the seconds
#: after it within which the server's answer must come.
STATEMENT_TIMEOUT, LATE_ANSWER = 30.0, 5.0

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

    @property
    def waits_for_answer(self) -> bool:
        """Whether the service waits for the server."""
        return False

    def wake(self) -> None:
        """End the sleep of the present pass. Override it if the service does not only wait for ``stopping``."""

    def goes_on(self) -> bool:
        """Return whether there is another pass."""
        return not self.stopping.is_set()

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
            while self.goes_on():
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
    statement that takes longer than ``statement_timeout`` seconds. If the server cannot be reached, ``end_late()``
    closes the connection.
    """

    #: Whether the session keeps the plans of prepared statements.
    keeps_plans = False

    def __init__(self, using: str) -> None:
        super().__init__()
        self.using = using
        self._connection: DatabaseWrapper | None = None
        # The same connection, but set already while the connection is being opened, because that also sends statements.
        self._awaited: DatabaseWrapper | None = None
        # Whether the session was lost, or there was none yet. Then ``connected`` has to be called.
        self._is_cut_off = True
        self._connects = 0
        # The number of statements, and since when the present one was found to wait, by time.monotonic().
        self._statements = 0
        self._late: tuple[int, float] = (0, math.inf)

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

    def use_connection_of_thread(self) -> None:
        """Use the present connection of this thread, and open no session. For code that calls ``run_once()`` itself."""
        self._connection = connection_for(self.using)

    def open(self) -> None:
        if self._connection is None:
            connection = dedicated_connection(self.using, application_name=f"lockworker {self.name}")
            self._awaited = connection
            connection.execute_wrappers.append(self._count)
            self._prepare(connection)
            self._connection = connections[self.using] = connection
            if self._is_cut_off:
                self._connects += 1
                self.connected()
                self._is_cut_off = False

    def _prepare(self, connection: DatabaseWrapper) -> None:
        # No limit here: the client's settings limit how long to wait for a server that does not answer.
        self.report_alive(math.inf)
        ensure_own_session(connection)
        self.report_alive()
        limit = f"{self.statement_timeout * 1000:.0f}ms"
        set_limits(connection, {**NO_LIMITS, **dict.fromkeys(OWN_LIMITS, limit)})
        if self.keeps_plans:
            keep_plans(connection)

    def close_session(self) -> None:
        """Close a session that is not needed for some time. This is no loss. The next ``open()`` opens another one."""
        connection, self._connection, self._awaited = self._connection, None, None
        if connection is not None:
            connection.close()
            del connections[self.using]

    def connected(self) -> None:
        """Prepare the work in a new session: the first session, or the next one after a loss."""

    def end_late(self) -> None:
        """End the session if the answer to a statement is late: the connection is half open. Call it once a second.

        For other threads. The server itself ends a statement after ``statement_timeout``.
        """
        connection, number, now = self._awaited, self._statements, time.monotonic()
        if connection is None or not has_statement_in_progress(connection):
            self._late = (0, math.inf)
        elif number != self._late[0]:
            self._late = (number, now)
        elif now - self._late[1] > self.statement_timeout + LATE_ANSWER:
            logger.warning(
                "The %s has had no answer for %.0f s. Its connection is closed.", self.name, now - self._late[1]
            )
            self._late = (0, math.inf)
            shut_down_socket(connection)

    @property
    def waits_for_answer(self) -> bool:
        """Whether the service waits for the server."""
        connection = self._awaited
        return connection is not None and has_statement_in_progress(connection)

    def _count(self, execute: Callable[..., Any], *statement: Any) -> Any:
        self._statements += 1
        return execute(*statement)

    def close(self) -> None:
        connection, self._connection, self._awaited = self._awaited, None, None
        if connection is not None:
            self._is_cut_off = True
            connection.close()
