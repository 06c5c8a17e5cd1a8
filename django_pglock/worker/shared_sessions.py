"""The database sessions that the services of a worker share: one for an idle worker, one for each service under load.

A service takes a session while it works, and gives it back before it waits. It gets the session that was given back
last. So surplus sessions are not used, and after some seconds all of them but one are closed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from psycopg.pq import TransactionStatus

from django_pglock.postgres.connections import transaction_status
from django_pglock.postgres.sessions import dedicated_connection

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

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
