"""Runs one attempt, from a claim to an ended claim. An exception of the user's function becomes an outcome here.

Each exception is caught, also SystemExit and CancelledError. They are not meant for the worker, because signals
arrive in the main thread. If a thread or a coroutine ended without an outcome, its task would stay RUNNING as long as
the worker lives. By default, an exception that is not an ``Exception`` is a failure without retry.
``retry_on=BaseException`` changes this.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async
from django.db import Error as DatabaseFailure
from django.db import InterfaceError, OperationalError, connections, transaction
from django.db.transaction import TransactionManagementError
from psycopg import Error as PsycopgError

from django_pglock.error_reading import message_of, one_line
from django_pglock.errors import ClaimLost, TaskCancelled
from django_pglock.loggers import WORKER, RateOfRecords, get_logger
from django_pglock.postgres.connections import (
    connection_for,
    end_session,
    has_statement_in_progress,
    is_read_only,
    shut_down_socket,
    sqlstates_of,
)
from django_pglock.store.children import write_gather
from django_pglock.store.outcome import Cancelled, Failed, Failure, GivenBack, Mixed, Outcome, Snoozed, readable
from django_pglock.store.rescue import interrupted
from django_pglock.store.settle import SettleRefused, settle_and_commit, take_success
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.step_records import Suspension
from django_pglock.worker.child.attempt import Attempt
from django_pglock.worker.child.in_flight import EndedClaim
from django_pglock.worker.child.logs import log_claim
from django_pglock.worker.child.task_connections import leave_read_only_sessions, was_ended_by_others

logger = get_logger(WORKER)

#: The system's errors if there are too few file descriptors, or too little memory, for the process or the host.
TOO_FEW = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
#: The first letters of SQLSTATEs that tell of the server's state: the connection, its resources, a lock that is held,
#: an operator's intervention, its files.
PASSING = ("08", "53", "55", "57", "58")
HAS_CLOSED = (
    "This atomic task has closed or replaced its database connection, and so its transaction was rolled back. Do not "
    "call connection.close() or connections.close_all() in an atomic function; the worker renews its connections."
)
HAS_LEFT_OPEN = (
    "This atomic task has left a block of atomic() open, or its connection in use, as by COPY or stream(), and so its "
    "transaction was rolled back. End both before the function returns."
)
HAS_HIDDEN = (
    "This atomic task, or an earlier one in its session, has hidden or removed its row, as by a search_path or a "
    "temporary table, and so its transaction was rolled back."
)
#: For claims that cannot begin. During an outage each thread tries again and again.
cannot_begin = RateOfRecords(60.0)


def prepare(claim: Claim, using: str) -> Attempt | EndedClaim:
    """Return the attempt of a claim, or the ended claim if the attempt cannot begin."""
    if claim.is_cancelled:
        return EndedClaim(claim, Cancelled(Failure.of(TaskCancelled())))
    try:
        attempt = Attempt(claim, using)
        return EndedClaim(claim, Cancelled(Failure.of(expired))) if (expired := attempt.expired()) else attempt
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


def run(attempt: Attempt, runner: Any) -> EndedClaim:
    """Run a sync function to its end."""
    attempt.runner = runner
    attempt.observe()
    if attempt.is_atomic:
        return _run_atomic(attempt)
    try:
        with attempt:
            value = attempt.call()
        outcome: Outcome | Mixed = attempt.success(value)
    except BaseException as raised:  # noqa: BLE001 - see above
        outcome = _failure_here(attempt, readable(raised))
        if isinstance(outcome, Snoozed) and (how := outcome.gather):
            return _gather(attempt, outcome, how)
    return attempt.ended(outcome)


async def run_async(attempt: Attempt, runner: Any) -> EndedClaim:
    """Run an async function to its end."""
    attempt.runner = runner
    attempt.observe()
    try:
        with attempt:
            value = await attempt.call()
        outcome: Outcome | Mixed = attempt.success(value)
    except BaseException as raised:  # noqa: BLE001 - see above
        error = readable(raised)
        if is_read_only(error):
            # In the thread in which Django's ORM runs for coroutines: that has their sessions.
            attempt.has_met_standby = await sync_to_async(leave_read_only_sessions)(attempt.using)
        outcome = _failure(attempt, error)
        if isinstance(outcome, Snoozed) and (how := outcome.gather):
            return await sync_to_async(_gather)(attempt, outcome, how)
    return attempt.ended(outcome)


def _gather(attempt: Attempt, outcome: Snoozed, how: Suspension) -> EndedClaim:
    """Enqueue the children for which a function was left, and suspend its task until they have ended."""
    try:
        write_gather(attempt.using, attempt.claim, how)
    except ClaimLost:
        return attempt.ended(None)
    except BaseException as raised:  # noqa: BLE001 - see above
        error = readable(raised)
        if isinstance(error, (OperationalError, InterfaceError)):
            # The function has no part in it. If it was the COMMIT, the guard of the next settle finds out.
            return attempt.ended(_outcome_around(attempt.claim, attempt.using, error, has_begun=True))
        return attempt.ended(_failure_here(attempt, error))
    return attempt.ended(outcome, is_settled=True)


def _run_atomic(attempt: Attempt) -> EndedClaim:
    """Run a function in a transaction whose last statement settles the claim.

    So its database changes and its completion are committed together, or neither is. If the task no longer belongs to
    the claim, everything is rolled back.
    """
    claim = attempt.claim
    has_begun = has_returned = False
    fault: str | None = None
    commits: list[bool] = []
    try:
        connection = connection_for(attempt.using)
        connection.ensure_connection()
        with transaction.atomic(using=attempt.using, durable=True):
            session: Any = connection.connection
            has_begun, blocks = True, len(connection.atomic_blocks)
            # Registered first, so it is called whatever the hooks of the function do.
            transaction.on_commit(partial(commits.append, True), using=attempt.using)
            try:
                with attempt:
                    value = attempt.call()
                outcome = attempt.success(value)
            finally:
                fault = _fault_in(connection, session, blocks)
            _refuse(fault)
            has_returned = True
            settle_and_commit(
                attempt.using, attempt.with_outcomes(outcome), wait_for_disk=attempt.definition.wait_for_disk
            )
    except ClaimLost:
        return attempt.ended(_outcome_without_row(attempt, connection))
    except BaseException as raised:
        error = readable(raised)
        if commits:
            logger.exception(
                "An on_commit hook of %s failed after its commit. The task has succeeded.",
                claim,
                extra=claim.log_fields(),
            )
            return attempt.ended(outcome, is_settled=True)
        if not has_begun:
            return attempt.ended(_outcome_around(claim, attempt.using, error, has_begun=False))
        if not has_returned and not isinstance(error, DatabaseFailure):
            return attempt.ended(_failure_here(attempt, error))
        if fault is not None:
            # A repetition would end in the same way each time, so it has to count as an attempt.
            counted = TransactionManagementError(fault)
            counted.__cause__ = None if error.args == counted.args else error
            return attempt.ended(attempt.failure(counted))
        if session.closed:
            # The connection is lost, and perhaps the COMMIT arrived. The guard of the next settle finds out. If nobody
            # else has ended the session, the function may have, by an idle transaction for example.
            is_suspect = not was_ended_by_others(session, error)
            return attempt.ended(interrupted(claim, error, is_suspect=is_suspect))
        return attempt.ended(_refused(attempt, error) if has_returned else _failure_here(attempt, error))
    return attempt.ended(outcome, is_settled=True)


def _refuse(fault: str | None) -> None:
    if fault is not None:
        raise TransactionManagementError(fault)


def _outcome_without_row(attempt: Attempt, connection: Any) -> Outcome | None:
    """Return the outcome of an atomic function whose transaction did not see its claim; None: the claim is lost."""
    fault = TransactionManagementError(HAS_HIDDEN)
    if take_success(attempt.using, attempt.claims):
        return attempt.failure(fault)
    if connection.in_atomic_block:
        # In a ``TestCase`` the end of the session would end the test.
        return None
    # An earlier task of the session may have hidden the row.
    end_session(connection)
    is_ours = take_success(attempt.using, attempt.claims)
    return interrupted(attempt.claim, fault, is_suspect=True) if is_ours else None


def _fault_in(connection: Any, session: Any, blocks: int) -> str | None:
    """Return why the transaction in which an atomic function was called is not the current one any more."""
    is_current = connections[connection.alias] is connection and connection.connection is session
    # A session that the server has ended, or this package, is broken.
    if not session.broken and (connection.closed_in_transaction or session.closed or not is_current):
        return HAS_CLOSED
    if has_statement_in_progress(connection):
        # A suspended generator holds psycopg's lock, and a ROLLBACK would wait for it forever.
        shut_down_socket(connection)
        connection.closed_in_transaction = True
        return HAS_LEFT_OPEN
    return HAS_LEFT_OPEN if len(connection.atomic_blocks) > blocks else None


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
        return _failure_here(attempt, error)
    is_suspect = take_success(attempt.using, attempt.claims)
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


def _failure_here(attempt: Attempt, error: BaseException) -> Outcome:
    """Return the outcome of a sync call that raised ``error`` in this thread."""
    if is_read_only(error):
        attempt.has_met_standby = leave_read_only_sessions(attempt.using)
    return _failure(attempt, error)


def _failure(attempt: Attempt, error: BaseException) -> Outcome:
    """Return the outcome of a call that raised ``error``."""
    if attempt.began is None and is_of_process(error):
        # It could not even be called: there is no memory for it, say.
        return _given_back(attempt.claim, attempt.using, error)
    return attempt.failure(error)
