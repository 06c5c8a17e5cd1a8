"""A thread that runs sync functions, and how a function in it is stopped.

``stop()`` cancels the statement that the function executes. Before and after each statement, the thread itself raises
``TaskStopped`` if the function must end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import psycopg
from django.db import connections
from django.db.backends.signals import connection_created

from django_pglock.error_reading import one_line, traceback_of
from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.connections import cancel_statement, has_statement_in_progress, shut_down_socket
from django_pglock.postgres.stopping import current_attempt
from django_pglock.worker.child.logs import log_claim
from django_pglock.worker.child.stoppable import StoppableAttempt
from django_pglock.worker.child.task_connections import expect_next_task, is_closed, is_reusable

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

    from django_pglock.tasks.claim import Claim

logger = get_logger(WORKER)

#: Seconds after the timeout after which the connection of a statement that still runs is closed. The connection may be
#: half open.
CANCEL_GRACE_PERIOD = 10.0

#: Seconds for which a thread may wait for the server before or after a function, in its BEGIN or COMMIT for example.
LONGEST_PHASE = 600

_here = threading.local()


class Watcher(Protocol):
    """The watchdog."""

    def watch(self, attempt: StoppableAttempt, stop: Callable[[StoppableAttempt], None]) -> None:
        """Call ``stop`` at the deadline of an attempt, until ``forget()``."""

    def forget(self, attempt: StoppableAttempt) -> None:
        """Note that an attempt has ended."""


class TaskThread:
    """The current thread, which runs sync functions one after the other. The thread itself makes this object."""

    def __init__(self, watchdog: Watcher) -> None:
        self.watchdog = watchdog
        self.attempt: StoppableAttempt | None = None
        #: The claim that the thread runs, from the first to the last statement for it.
        self.claim: Claim | None = None
        self.ident = threading.get_ident()
        self.generation = generation
        self._stopping = threading.Lock()
        self._sessions: list[weakref.ReferenceType[DatabaseWrapper]] = []
        # The claim for which the thread was found outside of its function, and at how many checks in a row.
        self._silent: tuple[Claim | None, int] = (None, 0)
        _here.thread = self
        connection_created.connect(_add_session, dispatch_uid="django_pglock.watchdog")

    def call(self, attempt: StoppableAttempt) -> Any:
        """Call the function of an attempt. What is raised is the error to record."""
        current_attempt.set(attempt)
        try:
            # First note the attempt, then check whether it is cancelled. A cancel does both in the other order.
            self.attempt = attempt
            attempt.begin()
            if attempt.timeout is not None:
                self.watchdog.watch(attempt, self.stop)
            try:
                value = attempt.call()
            finally:
                if generation != self.generation:
                    end_process(sys.exc_info()[1])
            if attempt.timeout is not None:
                attempt.refuse_late_success()
        except BaseException as error:
            if (reason := attempt.reason_of(error)) is error:
                raise
            raise reason  # noqa: B904 - its cause is set
        finally:
            self._end(attempt)
        return value

    def _end(self, attempt: StoppableAttempt) -> None:
        if attempt.timeout is not None:
            attempt.end()
            self.watchdog.forget(attempt)
        # Under the lock: a cancel request that is still in flight would cancel a statement of the next task.
        with self._stopping:
            self.attempt = None
        current_attempt.set(None)

    def stop(self, attempt: StoppableAttempt) -> None:
        """Cancel the SQL of an attempt that still runs. For other threads."""
        with self._stopping:
            if self.attempt is attempt:
                self._cancel_statements(attempt)

    def end_if_silent(self) -> None:
        """End the sessions of this thread if it waits for the server for very long before or after its function.

        A BEGIN or COMMIT on a half-open connection is never answered, and no timeout of the task applies to it. The
        main thread calls this once a second. It counts calls, because time also passes while the process is stopped.
        """
        claim = self.claim
        if claim is None or self.attempt is not None:
            self._silent = (None, 0)
            return
        silent, calls = self._silent
        self._silent = (claim, calls + 1 if silent is claim else 1)
        if self._silent[1] > LONGEST_PHASE:
            self._silent = (None, 0)
            for session in filter(None, [each() for each in self._sessions]):
                if session.vendor == "postgresql" and has_statement_in_progress(session):
                    logger.warning(
                        "%s has waited %d s for database %r before or after its function. Its connection is closed.",
                        claim,
                        LONGEST_PHASE,
                        session.alias,
                        extra=claim.log_fields(),
                    )
                    shut_down_socket(session)

    def _cancel_statements(self, attempt: StoppableAttempt) -> None:
        for session in filter(None, [each() for each in self._sessions]):
            if session.vendor != "postgresql" or session.connection in attempt.shut_down:
                continue
            try:
                is_busy = cancel_statement(session)
            except psycopg.Error as error:
                # The cancel request may arrive later, and would then cancel the next statement of the session.
                self._shut_down_socket(session, attempt, f"could not be cancelled ({one_line(error)})")
            else:
                if is_busy and time.monotonic() - attempt.deadline > CANCEL_GRACE_PERIOD:
                    # The server has cancelled the statement, or executes none, but its answer does not reach us.
                    self._shut_down_socket(session, attempt, "does not end although the server was asked to cancel it")

    def _shut_down_socket(self, session: DatabaseWrapper, attempt: StoppableAttempt, what: str) -> None:
        logger.warning(
            "A statement of %s %s. Its connection to database %r is closed.",
            attempt.claim,
            what,
            session.alias,
            extra=attempt.claim.log_fields(),
        )
        attempt.shut_down = (*attempt.shut_down, session.connection)
        shut_down_socket(session)

    def clean_up(self, claim: Claim) -> None:
        """Close connections that a task has left in a state that the next task must not get.

        Called after each task, so it only reads attributes. A few of them take as long as one call. libpq knows without
        a query whether a transaction is open, also one that Django has not begun.
        """
        for each in self._sessions:
            session = each()
            if session is None:
                continue
            if not is_reusable(session):
                self._close(session, claim)
            expect_next_task([session])

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

    def leave(self) -> None:
        """Note that this thread runs other code than tasks from now on."""
        _here.__dict__.pop("thread", None)

    def add(self, session: DatabaseWrapper) -> None:
        """Add a session that the thread has opened. The list is replaced, because the watchdog may be reading it."""
        others = [each for each in self._sessions if each() not in (None, session)]
        self._sessions = [*others, weakref.ref(session)]


def _add_session(connection: Any, **kwargs: Any) -> None:
    # The signal is sent in the thread that will use the connection.
    thread: TaskThread | None = getattr(_here, "thread", None)
    if thread is not None:
        thread.add(connection)
    elif any(each is connection for each in connections.all(initialized_only=True)):
        _of_others.append((weakref.ref(connection), threading.current_thread()))


#: The sessions of threads that tasks have started, as far as Django opened them.
_of_others: list[tuple[weakref.ReferenceType[DatabaseWrapper], threading.Thread]] = []


def close_sessions_of_ended_threads() -> None:
    """Close the sessions of threads of tasks that have ended. Python would do that when it next collects garbage."""
    for each in list(_of_others):
        session, thread = each[0](), each[1]
        if session is None or not thread.is_alive():
            _of_others.remove(each)
            # Not by Django, which lets only the thread itself close its session.
            with contextlib.suppress(Exception):
                session.connection.close()  # type: ignore[union-attr]


#: The number of forks from the process that has imported this module to this process. It is compared before and after
#: each task, because that is several times faster than to compare process ids.
generation = 0


def _after_fork_in_child() -> None:
    global generation
    generation += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def end_process(error: BaseException | None) -> NoReturn:
    """End this process at once, with the exit code that Python would use for ``error``.

    A forked child that returns from the task's function must not continue as a thread of the worker. It would settle
    the claim of its parent, and run the claims in the parent's inbox.
    """
    code = 0 if error is None else 1
    try:
        if error is not None:
            status: Any = error.code if isinstance(error, SystemExit) else error
            if status is None or isinstance(status, int):
                code = int(status or 0)
            else:
                sys.stderr.write(traceback_of(error))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
    finally:
        # Also if the streams of the project raise.
        os._exit(code & 0xFF)
