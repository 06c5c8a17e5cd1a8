"""A part of the worker that runs in a thread of its own: starts, stops twice without harm, can be waited for.

Each turn of its loop survives a lost connection: the service logs it once, closes what it had open, backs off with
jitter and continues. A service sleeps only by waiting on an event, so that a stop ends the sleep at once.

A service notes by when it will show life again, so that ``probes/health.py`` can say whether it is stuck.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psycopg
from django.db import DatabaseError, InterfaceError, OperationalError, connections

from django_pglock.postgres.connections import has_session_ended, is_forbidden, statement_under_way
from django_pglock.postgres.sessions import dedicated_connection, set_limits
from django_pglock.worker.shared_sessions import SharedSessions

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

logger = logging.getLogger("django_pglock.worker")

#: Seconds before the first retry after a failed turn; doubled each time, up to the second number.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0
#: The most seconds for one statement of a service, unless the service sets another limit.
STATEMENT_LIMIT = 30.0

#: The server's limits on a statement and on a session that is idle in a transaction. Services set their own values.
OWN_LIMITS = ("statement_timeout", "idle_in_transaction_session_timeout")
#: Limits that would end a session in normal operation.
NO_LIMITS = {"lock_timeout": "0", "idle_session_timeout": "0", "transaction_timeout": "0"}


class Service:
    """One looping thread. A subclass says what a turn is, and may say how to wake it and what to do at the end."""

    name = "service"

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failures = 0
        #: The moment, of time.monotonic(), up to which the service may show no life without being stuck.
        self.awake_by = math.inf

    @property
    def longest_pause(self) -> float:
        """The most seconds between two attempts after an error."""
        return LONGEST_PAUSE

    def start(self) -> None:
        """Start the thread. Call it once."""
        thread = threading.Thread(target=self._loop, name=f"lockworker-{self.name}", daemon=True)
        thread.start()
        # Not before: a thread that has not started is not alive, and another thread may ask just then who is missing.
        self._thread = thread

    def stop(self) -> None:
        """Ask the thread to end after its present turn. May be called twice, or before the start."""
        self.stopping.set()
        self.wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds for the end and say whether it came."""
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
        """Whether the thread has ended although nobody has stopped it."""
        return self._thread is not None and not self._thread.is_alive() and not self.stopping.is_set()

    def note_life(self, sleep: float = 0.0) -> None:
        """Note that the service lives, and may sleep or wait for another party for ``sleep`` seconds from now."""
        self.awake_by = time.monotonic() + sleep

    def wake(self) -> None:
        """End the sleep of the present turn. Override it if the service sleeps on anything else than ``stopping``."""

    def open(self) -> None:
        """Open what a turn needs, unless it is open. Called before each turn."""

    def turn(self) -> None:
        """Do the work once; sleep at the end of it if there is nothing to do."""
        raise NotImplementedError

    def close(self) -> None:
        """Close what a turn may have opened. Called after each failure."""

    def leave(self) -> None:
        """Close what the turns have open. Called at the end."""
        self.close()

    def last_turn(self) -> None:
        """Do what is left to do after the last turn, with what the turns have open. May fail."""

    def finish(self) -> None:
        """Close what the service has had open since its start."""

    def forbidden(self, error: BaseException) -> None:
        """Note that the role lacks a right. The service tries again in any case."""

    def _loop(self) -> None:
        try:
            while not self.stopping.is_set():
                self._one_turn()
            self.last_turn()
        finally:
            self.leave()
            self.finish()

    def _one_turn(self) -> None:
        self.note_life()
        try:
            self.open()
            self.turn()
        except (DatabaseError, InterfaceError, psycopg.Error, OSError) as error:
            self._back_off(error)
        except BaseException as error:  # the user's code may run here, and call sys.exit()
            logger.exception("The %s failed. It tries again.", self.name)
            self._back_off(error)
        else:
            if self._failures:
                logger.warning("The %s works again after %d failed attempts.", self.name, self._failures)
            self._failures = 0

    def _back_off(self, error: BaseException) -> None:
        self._failures += 1
        if self._failures == 1:
            # A refusal, such as of a missing right, is no loss of the connection.
            is_refusal = isinstance(error, DatabaseError) and not isinstance(error, OperationalError)
            what = "cannot do its work" if is_refusal else "has lost its database connection"
            logger.warning("The %s %s and tries again: %s", self.name, what, str(error).strip())
        self.close()
        if is_forbidden(error):
            self.forbidden(error)
        bound = min(self.longest_pause, FIRST_PAUSE * 2 ** min(self._failures - 1, 10))
        self.note_life(bound)
        self.stopping.wait(random.uniform(bound / 2, bound))  # noqa: S311


class ConnectedService(Service):
    """A service with a database session, opened before the first turn and again after each loss.

    The session replaces the thread's Django connection, so every query of this thread runs in it. Limits that a
    database administrator has set for the role are lifted, because here an idle session is normal. The server ends a
    statement that takes longer than ``patience`` seconds; if the server cannot be reached, ``Deadlines`` does.

    Without ``sessions`` the session is the service's own. Else the service takes one of them for each turn, and others
    may use it while this one waits.
    """

    #: The seconds for which a service that can wait does so while all sessions are in use, before it opens another.
    waits_for_session = 0.0

    def __init__(self, using: str, sessions: SharedSessions | None = None) -> None:
        super().__init__()
        self.using = using
        self.sessions = sessions
        self._connection: DatabaseWrapper | None = None
        # The same connection, already while it is being opened: that takes statements, too.
        self._awaited: DatabaseWrapper | None = None
        self._statements = 0
        # Whether a session was lost, or none was there yet: then ``connected`` has to be called.
        self._is_cut_off = True
        self._connects = 0
        # Whether the service has released its session within the present turn.
        self._has_released = False

    @property
    def patience(self) -> float:
        """The most seconds for one statement."""
        return STATEMENT_LIMIT

    @property
    def is_connected(self) -> bool:
        """Whether there is a session, as far as the service knows."""
        return self._connection is not None

    @property
    def reconnects(self) -> int:
        """How many sessions were opened because one before was lost."""
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
        # How long to wait for a server that does not answer is for the client's settings to say.
        self.note_life(math.inf)
        connection.ensure_connection()
        self.note_life()
        patience = f"{self.patience * 1000:.0f}ms"
        set_limits(connection, {**NO_LIMITS, **dict.fromkeys(OWN_LIMITS, patience)})
        if self.sessions is not None:
            self.sessions.prepare(connection)

    def release_session(self) -> None:
        """Let others use the session, if it is shared. Call it before a wait; the next turn takes one again."""
        if self.sessions is not None and self._connection is not None:
            connection, self._connection, self._awaited = self._connection, None, None
            connection.execute_wrappers.remove(self._count)
            del connections[self.using]
            self._has_released = True
            self.sessions.give_back(connection)

    def retake_session(self) -> None:
        """Take a session again within the turn, if the service has released one."""
        if self._has_released:
            self.open()

    def close_session(self) -> None:
        """Close the session, which is not lost: nothing needs it for some time. The next ``open()`` opens another."""
        connection, self._connection, self._awaited = self._connection, None, None
        if connection is not None:
            connection.close()
            del connections[self.using]

    def leave(self) -> None:
        self.release_session()
        self.close()

    def connected(self) -> None:
        """Prepare for work in a session that is the first one, or that replaces one that was lost."""

    def under_way(self) -> tuple[DatabaseWrapper, int] | None:
        """Return the session and the number of the statement that waits for its answer now. For other threads."""
        connection, number = self._awaited, self._statements
        return (connection, number) if connection is not None and statement_under_way(connection) else None

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
