"""Runs one attempt, from a claim to an ended claim. An exception of the user's function becomes an outcome here.

Each exception is caught, also SystemExit and CancelledError. They are not meant for the worker, because signals arrive
in the main thread. If a thread or a coroutine ended without an outcome, its task would stay RUNNING as long as the
worker lives. By default, an exception that is not an ``Exception`` is a failure without retry.
``retry_on=BaseException`` changes this.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

from asgiref.sync import sync_to_async
from django.db import Error as DatabaseFailure
from django.db import transaction
from django.db.transaction import TransactionManagementError
from psycopg import Error as PsycopgError
from psycopg.errors import CannotConnectNow, CrashShutdown, IdleInTransactionSessionTimeout

from django_pglock.error_reading import message_of, one_line
from django_pglock.errors import ClaimLost, TaskCancelled
from django_pglock.loggers import WORKER, RateOfRecords, get_logger
from django_pglock.postgres.connections import connection_for, end_session, is_read_only, sqlstates_of
from django_pglock.store.outcome import Cancelled, Failed, Failure, GivenBack, Outcome, Succeeded
from django_pglock.store.rescue import interrupted
from django_pglock.store.settle import SettleRefused, settle_and_commit, takes_success
from django_pglock.tasks.claim import Claim
from django_pglock.worker.child.attempt import Attempt
from django_pglock.worker.child.in_flight import EndedClaim
from django_pglock.worker.child.logs import log_claim
from django_pglock.worker.child.task_connections import leave_read_only_sessions

logger = get_logger(WORKER)
#: The system's errors if there are too few file descriptors, or too little memory, for the process or the host.
TOO_FEW = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
#: The first letters of SQLSTATEs that tell of the server's state: the connection, its resources, a lock that is held,
#: an operator's intervention, its files.
PASSING = ("08", "53", "55", "57", "58")
#: For claims that cannot begin. During an outage each thread tries again and again.
cannot_begin = RateOfRecords(60.0)


def prepare(claim: Claim, using: str) -> Attempt | EndedClaim:
    """Return the attempt of a claim, or the ended claim if the attempt cannot begin."""
    if claim.is_cancelled:
        return EndedClaim(claim, Cancelled(Failure.of(TaskCancelled())))
    try:
        return Attempt(claim, using)
    except Exception as error:  # noqa: BLE001 - any program may write rows, and the user's code may decode them
        if is_of_process(error):
            # Earlier attempts cannot be read, for example. The function has not begun.
            return EndedClaim(claim, _given_back(claim, using, error))
        return EndedClaim(claim, Failed(Failure.of(error)))


def end_by_error(claims: Sequence[Claim], using: str, error: BaseException, *, has_begun: bool) -> EndedClaim:
    """End claims after an error outside of the function. That is our error or the process's, and no attempt's."""
    ended, *same_call = (EndedClaim(each, _outcome_around(each, using, error, has_begun=has_begun)) for each in claims)
    ended.same_call = same_call
    return ended


def is_of_process(error: BaseException) -> bool:
    """Return whether a process cannot begin tasks: it has no session, memory, thread or file descriptor for them."""
    if isinstance(error, OSError):
        return error.errno in TOO_FEW
    is_about_thread = isinstance(error, RuntimeError) and "new thread" in message_of(error)
    return is_about_thread or isinstance(error, (DatabaseFailure, PsycopgError, MemoryError))


def _outcome_around(claim: Claim, using: str, error: BaseException, *, has_begun: bool) -> Outcome:
    if is_of_process(error) and not has_begun:
        return _given_back(claim, using, error)
    log_claim(logging.ERROR, claim, "met an error of the worker, not of its function: %s", one_line(error))
    return interrupted(claim, error, is_suspect=True)


def run(attempt: Attempt, call: Callable[[Attempt], Any]) -> EndedClaim:
    """Run a sync function to its end. ``call`` calls the function so that it can be stopped."""
    attempt.observe()
    if attempt.is_atomic:
        return _run_atomic(attempt, call)
    try:
        outcome = attempt.success(call(attempt))
    except BaseException as error:  # noqa: BLE001 - see the top of the module
        outcome = _failure(attempt, error)
    return attempt.ended(outcome)


async def run_async(attempt: Attempt, call: Callable[[Attempt], Awaitable[Any]]) -> EndedClaim:
    """Run an async function to its end. ``call`` calls the function so that it can be stopped."""
    attempt.observe()
    try:
        outcome = attempt.success(await call(attempt))
    except BaseException as error:  # noqa: BLE001 - see the top of the module
        if is_read_only(error):
            # In the thread in which Django's ORM runs for coroutines: that has their sessions.
            attempt.has_met_standby = await sync_to_async(leave_read_only_sessions)(attempt.using)
        outcome = _failure_before_call(attempt, error) or attempt.failure(error)
    return attempt.ended(outcome)


def _run_atomic(attempt: Attempt, call: Callable[[Attempt], Any]) -> EndedClaim:
    """Run a function in a transaction whose last statement settles the claim.

    So its database changes and its completion are committed together, or neither is. If the task no longer belongs to
    the claim, everything is rolled back.
    """
    claim = attempt.claim
    session: Any = None
    has_begun = has_returned = has_committed = False
    after_call, notices = SessionAfterCall(), list[str | None]()

    def note_commit() -> None:
        nonlocal has_committed
        has_committed = True

    try:
        connection = connection_for(attempt.using)
        connection.ensure_connection()
        session = connection.connection
        with CodesOfNotices(session) as notices, transaction.atomic(using=attempt.using, durable=True):
            has_begun = True
            # Registered first, so it is called whatever the hooks of the function do.
            transaction.on_commit(note_commit, using=attempt.using)
            try:
                outcome = attempt.success(call(attempt))
            finally:
                after_call = SessionAfterCall.of(connection, session)
            if not isinstance(outcome, Succeeded):
                transaction.set_rollback(True, using=attempt.using)
                return attempt.ended(outcome)
            has_returned = True
            successes: Any = attempt.outcomes(outcome)
            settle_and_commit(attempt.using, successes)
    except ClaimLost:
        return attempt.ended(None)
    except BaseException as error:
        if has_committed:
            logger.exception(
                "An on_commit hook of %s failed after its commit. The task has succeeded.",
                claim,
                extra=claim.log_fields(),
            )
            return attempt.ended(outcome, is_settled=True)
        if not has_begun:
            return attempt.ended(_outcome_around(claim, attempt.using, error, has_begun=False))
        if not has_returned and not isinstance(error, DatabaseFailure):
            return attempt.ended(_failure(attempt, error))
        if fault := error_if_function_ended_session(error, session, after_call):
            return attempt.ended(attempt.failure(fault))
        if session.closed:
            # The connection is lost, and perhaps the COMMIT arrived. The guard of the next settle finds out.
            return attempt.ended(interrupted(claim, error, is_suspect=may_be_own_end(error, notices)))
        return attempt.ended(_refused(attempt, error) if has_returned else _failure(attempt, error))
    return attempt.ended(outcome, is_settled=True)


def _is_passing(error: BaseException) -> bool:
    """Return whether an error tells of the state of the server or of the process, and not of what was written."""
    if isinstance(error, DatabaseFailure):
        return any(state.startswith(PASSING) for state in sqlstates_of(error))
    return is_of_process(error)


def _refused(attempt: Attempt, error: BaseException) -> Outcome:
    """Return the outcome of a function that has returned, whose settle or COMMIT was refused.

    If the table takes its success a moment later, the task itself may be the cause, by a setting that it has changed.
    """
    if not (isinstance(error, SettleRefused) or _is_passing(error)):
        # What it has written was refused.
        return _failure(attempt, error)
    is_suspect = takes_success(attempt.using, attempt.claim)
    # An earlier task may have changed the settings of the session.
    end_session(connection_for(attempt.using))
    cause = error.__cause__ if isinstance(error, SettleRefused) else None
    return interrupted(attempt.claim, cause or error, is_suspect=is_suspect)


def _given_back(claim: Claim, using: str, error: BaseException) -> Outcome:
    """Return the outcome of a claim that cannot begin in this process, and log the error."""
    if cannot_begin.allows():
        log_claim(
            logging.WARNING,
            claim,
            "cannot begin, because this process cannot use database %r, or lacks memory or threads: %s. It is given "
            "back, and another worker runs it. Other tasks may meet the same error; the next line about it follows "
            "after a minute",
            using,
            message_of(error),
        )
    return GivenBack()


def _failure_before_call(attempt: Attempt, error: BaseException) -> Outcome | None:
    """Return the outcome if the process could not even call the function: it could not start the watchdog, say."""
    if attempt.was_called or not is_of_process(error):
        return None
    return _given_back(attempt.claim, attempt.using, error)


def _failure(attempt: Attempt, error: BaseException) -> Outcome:
    """Return the outcome of a sync call that raised ``error`` in this thread."""
    if given_back := _failure_before_call(attempt, error):
        return given_back
    if is_read_only(error):
        attempt.has_met_standby = leave_read_only_sessions(attempt.using)
    return attempt.failure(error)


# Why the session of an atomic function has ended: by the function itself or its slowness, or by an outage.
#
# Some ends can have both reasons. Then the task is a suspect, and the server says more (``ServerTimes`` in rescue.py).


class Limit(NamedTuple):
    """A limit on a transaction by which the server ends a session: its name, and what the server says in English."""

    name: str
    says: str


#: The limits by SQLSTATE. psycopg 3.2.0 has no class for the second one.
LIMITS = {
    IdleInTransactionSessionTimeout.sqlstate: Limit(
        "idle_in_transaction_session_timeout", "terminating connection due to idle-in-transaction timeout"
    ),
    "25P04": Limit("transaction_timeout", "terminating connection due to transaction timeout"),
}


#: The server ends a session with these codes because another session has crashed, or because it stops.
ENDED_BY_OTHERS = (CrashShutdown.sqlstate, CannotConnectNow.sqlstate)


class CodesOfNotices:
    """A context that returns a list to which the codes of the server's notices on a psycopg connection are added.

    If one session crashes, the server tells all others by a notice. The one that has crashed gets none. This is no
    generator, because contextlib sets an attribute of the function's exception, which may be frozen.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._codes: list[str | None] = []

    def _note(self, diagnostic: Any) -> None:
        self._codes.append(diagnostic.sqlstate)

    def __enter__(self) -> list[str | None]:
        # Some pools lend another object, which has no attributes after its return.
        with suppress(AttributeError):
            self._session.add_notice_handler(self._note)
        return self._codes

    def __exit__(self, *_error: object) -> None:
        # The function may have removed all handlers.
        with suppress(AttributeError, ValueError):
            self._session.remove_notice_handler(self._note)


def may_be_own_end(error: BaseException, notices: Iterable[str | None]) -> bool:
    """Return whether the task may have ended its session. Not if the server or a pooler says that others did."""
    codes = filter(None, [*sqlstates_of(error), *notices])
    return not any(code in ENDED_BY_OTHERS or code.startswith("08") for code in codes)


class SessionAfterCall(NamedTuple):
    """What is known of the session right after the function, before ``atomic()`` or a statement of ours changes it."""

    #: The function has closed the session, through Django or through psycopg, while it was in order.
    is_closed: bool = False
    #: The message of libpq's last exchange on the session, if the session has ended.
    last_message: str = ""

    @classmethod
    def of(cls, connection: Any, session: Any) -> SessionAfterCall:
        """Look at the psycopg connection ``session``, which Django's ``connection`` had before the call.

        ``broken`` of psycopg is true for a session that was lost before it was closed, and for the sessions that this
        package ends: see ``end_session``. A session of a pool that was closed through Django may be open, and back in
        the pool.
        """
        if session.broken:
            return cls(False, session.pgconn.error_message.decode(errors="replace"))
        return cls(bool(connection.closed_in_transaction or session.closed))


def error_if_function_ended_session(
    error: BaseException, session: Any, after_call: SessionAfterCall
) -> TransactionManagementError | None:
    """Return the error to record if the function has ended its session; None if it was an outage.

    ``session`` is the psycopg connection of the attempt, None if there was none yet. A repetition would end in the same
    way each time, so it has to count as an attempt.
    """
    # A session to another database may have met its limit, too. Then this one is open.
    has_ended = session is not None and session.closed
    limit = _limit_met(error, after_call.last_message) if has_ended else None
    if limit is not None:
        text = (
            f"The server has ended the session of this atomic task by its limit {limit}, and rolled its transaction "
            f"back. Shorten the transaction, for example by slow calls before it or in another task, or raise {limit} "
            "for the role of the workers."
        )
    elif after_call.is_closed:
        text = (
            "This atomic task has closed its database connection, and so its transaction was rolled back. Do not call "
            "connection.close() or connections.close_all() in an atomic function; the worker renews its connections."
        )
    else:
        return None
    fault = TransactionManagementError(text)
    fault.__cause__ = error
    return fault


def _limit_met(error: BaseException, last_message: str) -> str | None:
    """Return the name of the limit by which the server has ended the session; None if it was no limit.

    If the function has caught the server's error, only libpq's message is left. That has no SQLSTATE, and is in the
    language of the server.
    """
    found = (LIMITS[each] for each in sqlstates_of(error) if each in LIMITS)
    said = (each for each in LIMITS.values() if each.says in last_message)
    return next((limit.name for limit in chain(found, said)), None)
