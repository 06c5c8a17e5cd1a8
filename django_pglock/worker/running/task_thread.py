"""A thread that runs sync functions, and how a function in it is stopped.

The thread runs other tasks before and after. An exception that is sent to the thread must be raised in this function,
never in the next task. Only ``TaskThread.stop()`` sends exceptions. It does so under the lock of the ``TaskThread``,
after a check that the function still runs. When the function has ended, the thread first notes that. Then it waits
until no ``stop()`` is in progress. Then it lets an exception be raised that was sent and has not been raised yet.
"""

from __future__ import annotations

import ctypes
import logging
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import psycopg
from django.db import connections
from django.db.backends.signals import connection_created

from django_pglock.error_reading import one_line
from django_pglock.errors import TaskTimeout
from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.connections import cancel_statement, has_statement_in_progress, shut_down_socket
from django_pglock.postgres.thread_stacks import stacks
from django_pglock.worker.logs import log_claim
from django_pglock.worker.running import forked_child
from django_pglock.worker.running.stoppable import StoppableAttempt
from django_pglock.worker.running.task_connections import is_closed, is_reusable
from django_pglock.worker.running.task_stack import stack_text

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

    from django_pglock.tasks.claim import Claim

logger = get_logger(WORKER)

#: The number of steps of a loop in which a sent exception is raised. One step is enough.
LOOP_STEPS = 3
#: Seconds between two attempts to stop a function whose time is over and that still runs.
BETWEEN_STOPS = 1.0
#: Seconds after the timeout after which the connection of a statement that still runs is closed. The connection may be
#: half open.
CANCEL_GRACE_PERIOD = 10.0
#: Seconds after the timeout after which it is logged that a function cannot be stopped.
OVERRUN = 5.0

_here = threading.local()


class Watcher(Protocol):
    """The watchdog: calls ``TaskThread.stop()`` at the deadline of an attempt."""

    grace_period: float
    #: Called with an attempt that still runs ``grace_period`` seconds after its timeout, and its stack as text.
    long_overdue: Callable[[StoppableAttempt, str], None]

    def ensure_started(self) -> None:
        """Start the watchdog, unless it has been started."""

    def expect(self, moment: float) -> None:
        """Check at this moment of time.monotonic(). May be called where TaskTimeout may be raised."""

    def wake(self) -> None:
        """Check now."""


class TaskThread:
    """The current thread, which runs sync functions one after the other. The thread itself makes this object."""

    def __init__(self, watchdog: Watcher) -> None:
        self.watchdog = watchdog
        self.attempt: StoppableAttempt | None = None
        #: The claim that the thread runs, from the first to the last statement for it.
        self.claim: Claim | None = None
        self.ident = threading.get_ident()
        self.generation = forked_child.generation
        self._stopping = threading.Lock()
        self._sessions: list[weakref.ReferenceType[DatabaseWrapper]] = []
        _here.thread = self
        connection_created.connect(_add_session, dispatch_uid="django_pglock.watchdog")

    def call(self, attempt: StoppableAttempt) -> Any:
        """Call the function of an attempt. After the return, no exception from outside is raised in the thread.

        Each line at which TaskTimeout may be raised is inside of the outer ``try``. TaskTimeout is raised only once. So
        if it interrupts the first ``_end``, it does not interrupt the second one.
        """
        try:
            try:
                # First note the attempt, then check whether it is cancelled. A cancel does both in the other order.
                self.attempt = attempt
                attempt.begin()
                if attempt.timeout is not None:
                    self._watch(attempt)
                return attempt.call()
            finally:
                if forked_child.generation != self.generation:
                    forked_child.end_process(sys.exc_info()[1])
                self._end(attempt)
        except TaskTimeout:
            self._end(attempt)
            raise

    def _watch(self, attempt: StoppableAttempt) -> None:
        self.watchdog.ensure_started()
        attempt.check_at = attempt.deadline
        self.watchdog.expect(attempt.deadline)

    def _end(self, attempt: StoppableAttempt) -> None:
        # No lock is taken, because TaskTimeout could be raised between the moment when the lock is taken and the
        # ``try`` that frees it. Each line may run twice.
        attempt.is_over = True
        try:
            while self._stopping.locked():
                time.sleep(0.0002)
            # A sent exception that has not been raised yet is raised here, in the steps of a loop. It is not withdrawn:
            # CPython would still check for it at each step of each thread, and a traced thread of 3.11 would hang.
            for _ in range(LOOP_STEPS):
                pass
        except TaskTimeout:
            pass
        self.attempt = None

    def cancel(self, attempt: StoppableAttempt) -> None:
        """Stop the function of a cancelled attempt of this thread."""
        self.watchdog.ensure_started()
        attempt.check_at = 0.0
        self.watchdog.wake()

    def stop(self, attempt: StoppableAttempt) -> None:
        """Stop an attempt that still runs: cancel its SQL. If it runs none and its time is over, raise TaskTimeout."""
        with self._stopping:
            if attempt.is_over:
                attempt.check_at = math.inf
                return
            is_overdue = attempt.is_overdue
            attempt.check_at = time.monotonic() + BETWEEN_STOPS if is_overdue else attempt.deadline
            was_busy = self._cancel_statements(attempt)
            if is_overdue and not was_busy and not attempt.is_stop_sent:
                attempt.is_stop_sent = attempt.is_disturbed = True
                _send(self.ident, TaskTimeout)
        _report(attempt)
        if not attempt.is_long_overdue and time.monotonic() - attempt.deadline > self.watchdog.grace_period:
            attempt.is_long_overdue = True
            self.watchdog.long_overdue(attempt, self._where())

    def _where(self) -> str:
        with stacks() as innermost:
            return stack_text(innermost.get(self.ident))

    def _cancel_statements(self, attempt: StoppableAttempt) -> bool:
        """Cancel the statements that the thread's sessions execute. Return whether there was one."""
        was_busy = False
        for session in filter(None, [each() for each in self._sessions]):
            if session.vendor != "postgresql":
                continue
            try:
                is_busy = cancel_statement(session)
            except psycopg.Error as error:
                # The cancel request may arrive later, and would then cancel the next statement of the session.
                is_busy = True
                self._shut_down_socket(session, attempt, f"could not be cancelled ({one_line(error)})")
            else:
                if is_busy and time.monotonic() - attempt.deadline > CANCEL_GRACE_PERIOD:
                    # The server has cancelled the statement, or executes none, but its answer does not reach us.
                    self._shut_down_socket(session, attempt, "does not end although the server was asked to cancel it")
            was_busy |= is_busy
        return was_busy

    def _shut_down_socket(self, session: DatabaseWrapper, attempt: StoppableAttempt, what: str) -> None:
        attempt.is_disturbed = True
        logger.warning(
            "A statement of %s %s. Its connection to database %r is closed.",
            attempt.claim,
            what,
            session.alias,
            extra=attempt.claim.log_fields(),
        )
        shut_down_socket(session)

    def clean_up(self, claim: Claim) -> None:
        """Close connections that a task has left in a state that the next task must not get.

        Called after each task, so it only reads attributes. A few of them take as long as one call. libpq knows without
        a query whether a transaction is open, also one that Django has not begun.
        """
        for each in self._sessions:
            session = each()
            if session is not None and not is_reusable(session):
                self._close(session, claim)

    def _close(self, session: DatabaseWrapper, claim: Claim) -> None:
        if connections[session.alias] is not session:
            # If Django has another connection for this thread, this one may be in use elsewhere.
            return
        if session.in_atomic_block or not is_closed(session):
            log_claim(
                logging.WARNING,
                claim,
                "has left a transaction open, autocommit off, or its connection in use, in database %r. Its "
                "uncommitted changes are rolled back",
                session.alias,
            )
        # Inside of an atomic block close() only notes that it was called.
        session.in_atomic_block = session.closed_in_transaction = False
        if has_statement_in_progress(session):
            # Another thread waits for an answer on this connection. It would crash if libpq's connection were freed.
            shut_down_socket(session)
            session.connection = None
        else:
            session.close()

    def add(self, session: DatabaseWrapper) -> None:
        """Add a session that the thread has opened. The list is replaced, because the watchdog may be reading it."""
        others = [each for each in self._sessions if each() not in (None, session)]
        self._sessions = [*others, weakref.ref(session)]


def _add_session(connection: Any, **kwargs: Any) -> None:
    # The signal is sent in the thread that will use the connection.
    thread: TaskThread | None = getattr(_here, "thread", None)
    if thread is not None:
        thread.add(connection)


def _send(thread: int, error: type[BaseException]) -> None:
    """Raise an exception in a thread, at its next step in Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _report(attempt: StoppableAttempt) -> None:
    if not attempt.is_reported and time.monotonic() - attempt.deadline > OVERRUN:
        attempt.is_reported = True
        logger.warning(
            "%s still runs more than %.0f s after its timeout. Code that does not return to Python cannot be stopped.",
            attempt.claim,
            OVERRUN,
            extra=attempt.claim.log_fields(),
        )
