"""Interrupts sync functions whose time is over or which somebody wants to end.

Such a function runs in a thread that runs other tasks before and after, so the question is not how to hit it but how to
miss the others. All that is done to a thread is done by ``Seat.strike()``, under the seat's lock, after a look at
whether the function still runs. The thread, when its function has ended, first says so, then waits until nobody strikes
any more, and then takes back an exception that was sent and has not been raised yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import psycopg
from django.db import connections
from django.db.backends.signals import connection_created
from psycopg.pq import TransactionStatus

from django_pglock.errors import TaskTimeout
from django_pglock.postgres.connections import cancel_statement, hang_up, statement_under_way
from django_pglock.worker.running.forked_child import end_here
from django_pglock.worker.running.stoppable import Interruptible
from django_pglock.worker.service import Service

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

    from django_pglock.tasks.claim import Claim
    from django_pglock.worker.running.attempt import Attempt

logger = logging.getLogger("django_pglock.worker")

#: Steps of a loop in which at the latest an exception strikes that was sent to a thread. One is enough.
STEPS = 3
#: Seconds between two strikes at a function whose time is over and that still runs.
BETWEEN_STRIKES = 1.0
#: Seconds over its time after which a statement that goes on loses its connection: perhaps it is half open.
CANCEL_PATIENCE = 10.0
#: Seconds over its time after which the log says that a function cannot be stopped.
OVERRUN = 5.0
#: Seconds of the watchdog's sleep at most.
LONGEST_SLEEP = 3600.0

_here = threading.local()


class Watchdog(Service):
    """Looks at each function when its time is over, and at once when it is told to.

    Its thread starts when there is something to look at for the first time. A thread of the executor runs one function
    at a time, so there are never more dates to remember than threads.

    ``stuck`` is called, with a text that says where it is, once for each attempt that still runs ``patience`` seconds
    after its timeout.
    """

    name = "watchdog"

    def __init__(
        self, *, patience: float = math.inf, stuck: Callable[[Interruptible, str], None] = lambda *_: None
    ) -> None:
        super().__init__()
        self.patience = patience
        self.stuck = stuck
        self.seats: list[Seat] = []
        self._starting = threading.Lock()
        # Neither event nor condition: their inner locks would stay locked if TaskTimeout struck between two lines.
        self._news: SimpleQueue[None] = SimpleQueue()
        self._sleeps_until = math.inf

    def seat(self) -> Seat:
        """Return a seat for the current thread."""
        seat = Seat(self)
        self.seats.append(seat)
        return seat

    def ensure_started(self) -> None:
        """Start the thread, unless it has been started."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self.start()

    def expect(self, moment: float) -> None:
        """Let the watchdog look at this moment. May be called where TaskTimeout may strike."""
        if moment < self._sleeps_until:
            self._news.put(None)

    def wake(self) -> None:
        self._news.put(None)

    def turn(self) -> None:
        # From here on everybody who expects something says so, until it is known for how long to sleep.
        self._sleeps_until = math.inf
        while not self._news.empty():
            self._news.get()
        soonest = math.inf
        for seat in self.seats:
            if (attempt := seat.attempt) is not None and attempt.look_at <= time.monotonic():
                seat.strike(attempt)
            if attempt is not None:
                soonest = min(soonest, attempt.look_at)
        self._sleeps_until = soonest
        sleep = max(0.0, min(LONGEST_SLEEP, soonest - time.monotonic()))
        self.note_life(sleep)
        with contextlib.suppress(Empty):
            self._news.get(timeout=sleep)


class Seat:
    """A thread that runs sync functions, one after the other, as the watchdog sees it. Made by the thread itself."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.watchdog = watchdog
        self.attempt: Interruptible | None = None
        #: The claim that the thread runs, from the first to the last statement for it.
        self.claim: Claim | None = None
        self.thread = threading.get_ident()
        self.process = os.getpid()
        self._striking = threading.Lock()
        self._sessions: list[weakref.ReferenceType[DatabaseWrapper]] = []
        _here.seat = self
        connection_created.connect(_note_session, dispatch_uid="django_pglock.watchdog")

    def call(self, attempt: Attempt) -> Any:
        """Call the function of an attempt. Once this has returned, nothing from outside reaches the thread.

        Every line at which TaskTimeout may strike is inside of the outer ``try``. It strikes once, so if the first
        ``_end`` was disturbed, the second is not.
        """
        try:
            try:
                self._begin(attempt)
                return attempt.call()
            finally:
                if os.getpid() != self.process:
                    end_here(sys.exc_info()[1])
                self._end(attempt)
        except TaskTimeout:
            self._end(attempt)
            raise

    def _begin(self, attempt: Interruptible) -> None:
        # First here, then the look whether it is cancelled: who cancels does the two the other way round.
        self.attempt = attempt
        attempt.begin()
        if attempt.timeout is not None:
            self.watchdog.ensure_started()
            attempt.look_at = attempt.deadline
            self.watchdog.expect(attempt.deadline)

    def _end(self, attempt: Interruptible) -> None:
        # No lock is taken: TaskTimeout could strike between taking it and knowing that. Each line may run twice.
        attempt.is_over = True
        try:
            while self._striking.locked():
                time.sleep(0.0002)
            # What was sent and has not struck does so here, in the steps of a loop. It is not taken back: CPython would
            # go on looking for it at each step of each thread, and 3.11 would do nothing else where it is traced.
            for _ in range(STEPS):
                pass
        except TaskTimeout:
            pass
        self.attempt = None

    def cancel(self, attempt: Interruptible) -> None:
        """Have an attempt of this seat interrupted that somebody wants to end."""
        self.watchdog.ensure_started()
        attempt.look_at = 0.0
        self.watchdog.wake()

    def strike(self, attempt: Interruptible) -> None:
        """Interrupt an attempt, unless it has ended: its SQL, or else, if its time is over, the function itself."""
        with self._striking:
            if attempt.is_over:
                attempt.look_at = math.inf
                return
            is_overdue = attempt.is_overdue
            attempt.look_at = time.monotonic() + BETWEEN_STRIKES if is_overdue else attempt.deadline
            was_busy = self._cancel_statements(attempt)
            if is_overdue and not was_busy and not attempt.is_struck:
                attempt.is_struck = attempt.is_disturbed = True
                _send(self.thread, TaskTimeout)
        _report(attempt)
        if not attempt.is_stuck and time.monotonic() - attempt.deadline > self.watchdog.patience:
            attempt.is_stuck = True
            self.watchdog.stuck(attempt, self._where())

    def _where(self) -> str:
        frame = sys._current_frames().get(self.thread)  # noqa: SLF001 - there is no other name for it
        return "".join(traceback.format_stack(frame))

    def _cancel_statements(self, attempt: Interruptible) -> bool:
        """Cancel what the thread's sessions are doing, and say whether there was something."""
        was_busy = False
        for session in filter(None, [each() for each in self._sessions]):
            if session.vendor != "postgresql":
                continue
            try:
                is_busy = cancel_statement(session)
            except psycopg.Error as error:
                # It may still arrive, and meet what the session does next.
                is_busy = True
                self._hang_up(session, attempt, f"could not be cancelled ({str(error).strip()})")
            else:
                if is_busy and time.monotonic() - attempt.deadline > CANCEL_PATIENCE:
                    # The server has heard of it, or has nothing to cancel; we do not hear of that.
                    self._hang_up(session, attempt, "does not end although it was cancelled")
            was_busy |= is_busy
        return was_busy

    def _hang_up(self, session: DatabaseWrapper, attempt: Interruptible, what: str) -> None:
        attempt.is_disturbed = True
        logger.warning(
            "A statement of %r %s; its connection to database %r is closed.",
            attempt.claim,
            what,
            session.alias,
            extra=attempt.claim.log_fields(),
        )
        hang_up(session)

    def clean_up(self, claim: Claim) -> None:
        """Close connections that a task has left in any state but at rest: the next one would use them.

        Called after each task, so it only looks at attributes: a few of them take as long as a call. libpq knows of
        a BEGIN that Django does not know of, without asking the server.
        """
        for each in self._sessions:
            session = each()
            if session is not None and not is_at_rest(session):
                self._close(session, claim)

    def _close(self, session: DatabaseWrapper, claim: Claim) -> None:
        if connections[session.alias] is not session:
            # What is not Django's for this thread may be in use elsewhere.
            return
        if session.in_atomic_block or not is_closed(session):
            logger.warning(
                "%r has left a transaction open, autocommit off, or its connection in use, in database %r; what it has "
                "not committed is lost.",
                claim,
                session.alias,
                extra=claim.log_fields(),
            )
        # In an atomic block close() only notes that it was called.
        session.in_atomic_block = session.closed_in_transaction = False
        if statement_under_way(session):
            # Another thread waits for an answer on it. It would crash if libpq's connection were freed.
            hang_up(session)
            session.connection = None
        else:
            session.close()

    def add(self, session: DatabaseWrapper) -> None:
        """Remember a session that the thread has opened. The list is made anew: the watchdog may be reading it."""
        others = [each for each in self._sessions if each() not in (None, session)]
        self._sessions = [*others, weakref.ref(session)]


def is_at_rest(session: DatabaseWrapper) -> bool:
    """Say whether a session of PostgreSQL, or of another database, is as the next task may have it."""
    raw: Any = session.connection
    if raw is None:
        return True
    has_autocommit = session.settings_dict["AUTOCOMMIT"]
    if session.in_atomic_block or session.autocommit is not has_autocommit:
        return False
    if session.vendor != "postgresql" or not has_autocommit:
        # Without autocommit a transaction is open in any case; such a session is never kept.
        return True
    # A closed one is neither idle nor in a transaction.
    return bool(raw.pgconn.transaction_status == TransactionStatus.IDLE)


def is_closed(session: DatabaseWrapper) -> bool:
    """Say whether somebody has closed psycopg's connection under Django's."""
    return session.vendor == "postgresql" and bool(session.connection.closed)


def _note_session(connection: Any, **kwargs: Any) -> None:
    # Comes in the thread that will use the connection.
    seat: Seat | None = getattr(_here, "seat", None)
    if seat is not None:
        seat.add(connection)


def _send(thread: int, error: type[BaseException]) -> None:
    """Have a thread raise an exception at its next step in Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def _report(attempt: Interruptible) -> None:
    if not attempt.is_reported and time.monotonic() - attempt.deadline > OVERRUN:
        attempt.is_reported = True
        logger.warning(
            "%r still runs more than %.0f s after its timeout. What does not return to Python cannot be stopped.",
            attempt.claim,
            OVERRUN,
            extra=attempt.claim.log_fields(),
        )
