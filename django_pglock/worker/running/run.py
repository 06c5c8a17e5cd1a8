"""Runs one attempt, from a claim to an ended claim. An exception of the user's function becomes an outcome here.

Each exception is caught, also SystemExit and CancelledError. They are not meant for the worker, because signals arrive
in the main thread. If a thread or a coroutine ended without an outcome, its task would stay RUNNING as long as the
worker lives. By default, an exception that is not an ``Exception`` is a failure without retry.
``retry_on=BaseException`` changes this.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from asgiref.sync import sync_to_async
from django.db import Error as DatabaseFailure
from django.db import transaction

from django_pglock.error_reading import one_line
from django_pglock.errors import ClaimLost, TaskCancelled
from django_pglock.loggers import WORKER, RateOfRecords, get_logger
from django_pglock.postgres.connections import connection_for, is_read_only
from django_pglock.store.outcome import Cancelled, Failed, Failure, GivenBack, Outcome, Succeeded
from django_pglock.store.progress import write_progress
from django_pglock.store.settle import settle_and_commit
from django_pglock.tasks.claim import Claim
from django_pglock.worker.ended_claim import EndedClaim
from django_pglock.worker.logs import log_claim
from django_pglock.worker.running.attempt import Attempt
from django_pglock.worker.running.ended_session import SessionAfterCall, error_if_function_ended_session
from django_pglock.worker.running.task_connections import leave_read_only_sessions

logger = get_logger(WORKER)
#: For claims that cannot begin. During an outage each thread tries again and again.
cannot_begin = RateOfRecords(60.0)


def prepare(claim: Claim, using: str) -> Attempt | EndedClaim:
    """Return the attempt of a claim, or the ended claim if the attempt cannot begin."""
    if claim.is_cancelled:
        return EndedClaim(claim, Cancelled(Failure.of(TaskCancelled())))
    try:
        return Attempt(claim, using)
    except DatabaseFailure as error:
        # Earlier attempts cannot be read, because the database cannot be reached. The function has not begun.
        return EndedClaim(claim, _given_back(claim, using, error))
    except Exception as error:  # noqa: BLE001 - any program may write rows, and the user's code may decode them
        return EndedClaim(claim, Failed(Failure.of(error)))


def end_by_error(claims: Sequence[Claim], error: BaseException) -> EndedClaim:
    """End claims after an error outside of the user's function, or after an error that the ``try`` did not catch."""
    outcome = Failed(Failure.of(error))
    ended, *same_call = (EndedClaim(claim, outcome) for claim in claims)
    ended.same_call = same_call
    return ended


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
        outcome = attempt.failure(error)
    return attempt.ended(outcome)


def _run_atomic(attempt: Attempt, call: Callable[[Attempt], Any]) -> EndedClaim:
    """Run a function in a transaction whose last statement settles the claim.

    So its database changes and its completion are committed together, or neither is. If the task no longer belongs to
    the claim, everything is rolled back.
    """
    claim = attempt.claim
    session: Any = None
    has_begun = has_committed = False
    after_call = SessionAfterCall()

    def note_commit() -> None:
        nonlocal has_committed
        has_committed = True

    try:
        connection = connection_for(attempt.using)
        connection.ensure_connection()
        session = connection.connection
        with transaction.atomic(using=attempt.using, durable=True):
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
            _settle_and_commit(attempt, outcome)
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
        if not isinstance(error, DatabaseFailure):
            return attempt.ended(_failure(attempt, error))
        if fault := error_if_function_ended_session(error, session, after_call):
            return attempt.ended(attempt.failure(fault))
        if session is None or session.closed:
            if not has_begun:
                return attempt.ended(_given_back(claim, attempt.using, error))
            # The connection is lost, and perhaps the COMMIT arrived. The guard of the next settle finds out.
            return attempt.ended(attempt.interruption(error))
        return attempt.ended(_failure(attempt, error))
    return attempt.ended(outcome, is_settled=True)


def _given_back(claim: Claim, using: str, error: BaseException) -> Outcome:
    """Return the outcome of a claim that cannot begin, because its thread has no connection, and log the error."""
    if cannot_begin.allows():
        log_claim(
            logging.WARNING,
            claim,
            "cannot begin, because its thread cannot use database %r: %s. It is given back, and a worker that can use "
            "the database runs it. Other tasks may meet the same error; the next line about it follows after a minute",
            using,
            one_line(error),
        )
    return GivenBack()


def _failure(attempt: Attempt, error: BaseException) -> Outcome:
    """Return the outcome of a sync call that raised ``error`` in this thread."""
    if is_read_only(error):
        attempt.has_met_standby = leave_read_only_sessions(attempt.using)
    return attempt.failure(error)


def _settle_and_commit(attempt: Attempt, outcome: Outcome) -> None:
    if told := [each for each in attempt.claims if each.progress is not each.written_progress]:
        write_progress(attempt.using, told, is_last=True)
    successes: Any = attempt.outcomes(outcome)
    settle_and_commit(attempt.using, successes)
