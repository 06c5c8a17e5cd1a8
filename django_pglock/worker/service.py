"""Services: the parts of the worker that have a thread and a database session of their own.

Such a thread calls ``run_once()`` in a loop. One call is a pass. If a pass loses its database connection, the service
logs this once, closes the connection, backs off with jitter, and continues. A service sleeps only by waiting for an
event, so that a stop ends the sleep at once.

A service reports that it is alive, and when it will report next, so that others can find out whether it hangs.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psycopg
from django.db import InterfaceError, OperationalError, connections

from django_pglock.conf import get_settings
from django_pglock.error_reading import one_line
from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.connections import (
    CONNECTION_ERRORS,
    connection_for,
    has_statement_in_progress,
    pause_after,
    shut_down_socket,
    sqlstates_of,
)
from django_pglock.postgres.sessions import dedicated_connection, set_limits
from django_pglock.store.statements import keep_plans

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

logger = get_logger(WORKER)

#: The time limit for one statement of a service in seconds, unless the service sets another limit. And the seconds
#: after it within which the server's answer must come, if the limit is not shorter.
STATEMENT_TIMEOUT, LATE_ANSWER = 30.0, 5.0

#: A service counts as hung after this multiple of HEARTBEAT_LIMIT without a report. A multiple of one would be too
#: strict: it may wait for a lock on a table that is being changed.
HUNG_AFTER = 2

#: The first letters of SQLSTATEs by which the server refuses or ends a connection: errors of the connection, too few
#: resources, and an operator's intervention. Not 57014, the cancel of a statement.
CONNECTION_SQLSTATES = ("08", "53", "57P")

#: The server's limits for a statement, and for a session that is idle in a transaction. Services set their own values.
OWN_LIMITS = ("statement_timeout", "idle_in_transaction_session_timeout")
#: Limits that are switched off, because they would end a service's session in normal operation.
NO_LIMITS = {"lock_timeout": "0", "idle_session_timeout": "0", "transaction_timeout": "0"}


class Stage:
    """What a part is busy with, and at how many checks in a row it was busy with the same.

    It counts checks instead of seconds, because time also passes while the process is stopped.
    """

    def __init__(self) -> None:
        self._what: Any = None
        self.checks = 0

    def check(self, what: Any) -> int:
        """Note what the part is busy with now; None: with nothing. Return the number of checks."""
        self.checks = self.checks + 1 if what is not None and what is self._what else 0
        self._what = what
        return self.checks


class Service:
    """One thread with a loop and a database session.

    A subclass defines a pass, and may define how to wake it and what to do at the end. The session is the thread's
    Django connection, so each query of this thread runs in it. It is opened before the first pass, and again after each
    loss. Time limits that a database administrator has set for the role are switched off, because here an idle session
    is normal. The server cancels a statement that takes longer than ``statement_timeout`` seconds. If the server cannot
    be reached, ``trouble()`` closes the connection.
    """

    name = "service"
    #: Whether the session keeps the plans of prepared statements.
    keeps_plans = False

    def __init__(self, using: str) -> None:
        self.using = using
        self.stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failures = 0
        #: The error of the last pass; None if it had none.
        self.last_error: BaseException | None = None
        #: The moment, of time.monotonic(), until which the service reports again if it does not hang.
        self.next_report_by = math.inf
        # Set already while the session is being opened, because that also sends statements.
        self._connection: DatabaseWrapper | None = None
        self._connects = 0
        self._statements = 0
        #: The statement for which it waits, or the moment at which it should have reported.
        self.stage = Stage()

    @property
    def statement_timeout(self) -> float:
        """The time limit for one statement in seconds."""
        return STATEMENT_TIMEOUT

    # For other threads

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

    @property
    def is_connected(self) -> bool:
        """Whether the service has a session, as far as it knows."""
        connection = self._connection
        return connection is not None and connection.connection is not None

    @property
    def reconnects(self) -> int:
        """The number of sessions that were opened because an earlier one was lost."""
        return max(0, self._connects - 1)

    def trouble(self) -> str | None:
        """Return in a sentence why the thread does nothing any more; None: it works. Call it once a second.

        If it waits for the server for too long, the connection is half open, and is closed: the server itself ends a
        statement after ``statement_timeout``.
        """
        if self.is_missing:
            return f"The {self.name} has ended."
        if (connection := self._connection) is not None and has_statement_in_progress(connection):
            checks = self.stage.check(self._statements)
            if checks > self.statement_timeout + min(LATE_ANSWER, self.statement_timeout):
                logger.warning("The %s has had no answer for %d s. Its connection is closed.", self.name, checks)
                shut_down_socket(connection)
            return None
        is_silent = self.next_report_by < time.monotonic() and self.is_running
        checks = self.stage.check(self.next_report_by if is_silent else None)
        if checks > HUNG_AFTER * get_settings().HEARTBEAT_LIMIT:
            return f"The {self.name} has not responded for {checks} s."
        return None

    # What a subclass may define

    def wake(self) -> None:
        """End the sleep of the present pass. Override it if the service does not only wait for ``stopping``."""

    def connected(self) -> None:
        """Prepare the work in a new session: the first session, or the next one after a loss."""

    def run_once(self) -> None:
        """Do the work once. Sleep at the end if there is nothing to do."""
        raise NotImplementedError

    def flush(self) -> None:
        """Do the remaining work after the last pass, in the same session. May fail."""

    def finish(self) -> None:
        """Close the resources that the service has used since its start."""

    def open(self) -> None:
        """Open the session for a pass, unless it is open. Called before each pass."""
        if self._connection is not None:
            return
        connection = dedicated_connection(self.using, application_name=f"lockworker {self.name}")
        self._connection = connections[self.using] = connection
        connection.execute_wrappers.append(self._count)
        # No limit here: the client's settings limit how long to wait for a server that does not answer.
        self.report_alive(math.inf)
        connection.ensure_connection()
        self.report_alive()
        limit = f"{self.statement_timeout * 1000:.0f}ms"
        set_limits(connection, {**NO_LIMITS, **dict.fromkeys(OWN_LIMITS, limit)})
        if self.keeps_plans:
            keep_plans(connection)
        # A session that is opened again because the last one was not needed for some time needs no preparation.
        if self._failures or not self._connects:
            self._connects += 1
            self.connected()

    def close(self) -> None:
        """Close the session. Called after each failure and at the end, and if it is not needed for some time."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            del connections[self.using]

    # For its own thread

    def use_connection_of_thread(self) -> None:
        """Use the present connection of this thread, and open no session. For code that calls ``run_once()`` itself."""
        self._connection = connection_for(self.using)

    def report_alive(self, sleep: float = 0.0) -> None:
        """Report that the service is alive. It may sleep or wait for ``sleep`` seconds before it reports again."""
        self.next_report_by = time.monotonic() + sleep

    def _loop(self) -> None:
        try:
            while not self.stopping.is_set():
                self._run_once_or_back_off()
            self.flush()
        except CONNECTION_ERRORS as error:
            logger.warning("The %s could not finish its work: %s", self.name, one_line(error))
        finally:
            self.close()
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
        pause = pause_after(self._failures)
        self.report_alive(pause)
        self.stopping.wait(pause)

    def _log_trouble(self, error: BaseException) -> None:
        what = "cannot do its work"
        if _is_about_connection(error):
            what = "has lost its database connection" if self._connects else "cannot reach the database"
        logger.warning("The %s %s and tries again: %s", self.name, what, one_line(error))

    def _count(self, execute: Callable[..., Any], *statement: Any) -> Any:
        self._statements += 1
        return execute(*statement)


def _is_about_connection(error: BaseException) -> bool:
    """Return whether an error is about the connection, and not about a statement that the server refuses or cancels."""
    if not isinstance(error, (OperationalError, InterfaceError, psycopg.OperationalError, OSError)):
        return False
    # An error of libpq has no SQLSTATE. A statement timeout, for example, is an OperationalError with another one.
    return all(state.startswith(CONNECTION_SQLSTATES) for state in sqlstates_of(error))
