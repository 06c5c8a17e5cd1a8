"""Running one attempt: from a claim to an outcome. The only ``try`` around the user's function is here.

It catches everything, SystemExit and CancelledError included. Neither is meant for us: signals arrive in the main
thread, and a thread or a coroutine that ended without an outcome would leave its task running for ever, kept alive by
the worker's own pulse. What is no ``Exception`` is a failure that is not retried.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

from django.apps import apps
from django.db import Error as DatabaseFailure
from django.db import transaction

from django_pglock.errors import ClaimLost, TaskCancelled, TaskOptionError, TaskResultError, TooManySnoozes
from django_pglock.locks import lock
from django_pglock.postgres.connections import connection_for, is_read_only
from django_pglock.postgres.known_connections import leads_to_standby
from django_pglock.store.outcome import (
    SUCCEEDED,
    Cancelled,
    Failed,
    Failure,
    Interrupted,
    Outcome,
    Released,
    Retried,
    Snoozed,
    Succeeded,
)
from django_pglock.store.progress import note_progress
from django_pglock.store.settle import settle_and_commit
from django_pglock.tasks import registry
from django_pglock.tasks.arguments import from_json, to_json
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.compat import TaskResult
from django_pglock.tasks.context import TaskContext
from django_pglock.tasks.fields import TaskFields
from django_pglock.tasks.flow import Cancel, Retry, Snooze
from django_pglock.tasks.results import as_called, error_of, make_result
from django_pglock.tasks.retry import DEFAULT_BACKOFF, MAX_DELAY, delay_after
from django_pglock.worker.in_flight import Ending
from django_pglock.worker.logs import is_heard_of_tasks as is_heard
from django_pglock.worker.running.stoppable import Interruptible

logger = logging.getLogger("django_pglock.worker")

#: Seconds before a task that was cut off from the database runs again; doubled each time up to the second number.
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0


class Attempt(Interruptible):
    """One attempt of one claim: the function, its arguments decoded, and its result object."""

    def __init__(self, claim: Claim, using: str) -> None:
        definition = registry.find(claim.task_path)
        if definition is None:
            raise LookupError(f"{claim.task_path} is not registered")
        self.claim = claim
        self.using = using
        self.definition: TaskFields = definition
        meta: dict[str, Any] = {} if claim.meta == "{}" else from_json(claim.meta)
        self.options: dict[str, Any] = meta.get("options", {})
        #: How often the task has snoozed, where that is limited.
        self.snoozes: int = meta.get("snoozes", 0)
        self.timeout = self.options.get("timeout", definition.timeout)
        self.args: list[Any] = [] if claim.args == "[]" else from_json(claim.args)
        self.kwargs: dict[str, Any] = {} if claim.kwargs == "{}" else from_json(claim.kwargs)
        if not isinstance(self.args, list) or not isinstance(self.kwargs, dict):
            raise TypeError(f"Task {claim.id} has args or kwargs that are no list and no object.")
        #: Whether anybody wants to hear of its start and its success; of a failure, everybody does.
        self.is_heard = is_heard()
        # What was tried before has to be read now, while a failure to read it means only that nothing has begun.
        self._result = self._running_result() if self.is_heard or not claim.is_first else None

    @property
    def result(self) -> TaskResult[..., Any]:
        """The result object of django.tasks. To make one takes as long as a small task, so it is made when needed."""
        if self._result is None:
            self._result = self._running_result()
        return self._result

    @property
    def is_atomic(self) -> bool:
        """Whether the function and its completion share a transaction."""
        return bool(self.options.get("atomic", self.definition.atomic))

    def call(self) -> Any:
        """Call the function. For an async one this returns the coroutine."""
        function = self.definition.func
        if self.definition.advisory:
            function = held(self._lock_name(), function)
        if self.definition.takes_context:
            context = TaskContext(task_result=self.result, _claims=self.claims, _reason_to_stop=self.reason_to_stop)
            return function(context, *self.args, **self.kwargs)
        return function(*self.args, **self.kwargs)

    def _lock_name(self) -> str:
        """Return the name of the advisory lock to hold. A row that another program wrote may have none."""
        name = self.claim.lock_key
        if name is None:
            raise TaskOptionError(f"{self.claim.task_path} has advisory=True, and the row of the task has no lock key.")
        return name

    def outcomes(self, outcome: Outcome) -> list[tuple[Claim, Outcome]]:
        """Return what comes of each claim that this attempt stands for."""
        return [(self.claim, outcome)]

    def ending(self, outcome: Outcome | None, *, is_settled: bool = False) -> Ending:
        """Return the ending of this attempt, with a result object if somebody will hear of it."""
        if isinstance(outcome, Succeeded) and not self.is_heard:
            return Ending(self.claim, outcome, is_settled=is_settled)
        seconds = None if self.began is None else time.monotonic() - self.began
        return Ending(self.claim, outcome, self.result, is_settled=is_settled, seconds=seconds)

    def success(self, value: Any) -> Outcome:
        """Return the outcome of a call that returned ``value``: a failure if the value is no JSON."""
        if value is None:
            return SUCCEEDED
        what = f"The return value of {self.claim.task_path}"
        try:
            return Succeeded(to_json(value, what=what, kind=TaskResultError))
        except TaskResultError as error:
            return self.failure(error)
        except BaseException as broken:  # noqa: BLE001 - a container may be the user's, and its code, too
            refused = TaskResultError(f"{what} cannot be read: {type(broken).__name__}.")
            refused.__cause__ = broken
            return self.failure(refused)

    def failure(self, error: BaseException) -> Outcome:
        """Return the outcome of a call that raised ``error``, by the function's retry policy."""
        if isinstance(error, TaskResultError):
            # The function has run to its end: neither its retries nor the end of its time are about this.
            return Failed(Failure.of(error))
        try:
            return self._failure(self.reason_of(error))
        except BaseException as broken:
            # Classes of exceptions and retry policies are the user's code, too.
            logger.exception("What is to become of %r cannot be found out; it fails.", self.claim)
            return Failed(Failure.of(broken))

    def interruption(self, error: BaseException) -> Interrupted:
        """Return the outcome of a call that was cut off from the database, of which nothing remains."""
        claim = self.claim
        # What was given back before it began counts here as well: that comes from an outage, too.
        before = max(0, claim.attempt - 1 - claim.retries - claim.rescues)
        bound = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(before, 10))
        return Interrupted(Failure.of(error), random.uniform(bound / 2, bound))  # noqa: S311

    def _failure(self, error: BaseException) -> Outcome:
        if is_read_only(error):
            # Whatever the session leads to now, the next task is to have another.
            self.is_disturbed = True
            if leads_to_standby(self.using):
                return self.interruption(error)
        if isinstance(error, Snooze):
            return self._snoozed(error)
        claim = self.claim
        failure = Failure.of(error)
        if isinstance(error, Cancel | TaskCancelled):
            return Cancelled(failure)
        may_retry = isinstance(error, Retry) or self.definition.can_retry(error)
        if claim.retries >= claim.max_retries or not may_retry:
            return Failed(failure)
        return Retried(failure, self._delay(error, failure))

    def _snoozed(self, error: Snooze) -> Outcome:
        delay, most = min(error.seconds, MAX_DELAY), self.options.get("max_snoozes", self.definition.max_snoozes)
        if most is None:
            return Snoozed(delay)
        if self.snoozes < most:
            return Snoozed(delay, self.snoozes + 1)
        refused = TooManySnoozes(f"The task has snoozed {most} times already, which is its max_snoozes.")
        refused.__cause__ = error
        return Failed(Failure.of(refused))

    def _delay(self, error: BaseException, failure: Failure) -> float:
        if isinstance(error, Retry) and error.seconds is not None:
            return min(error.seconds, MAX_DELAY)

        def result() -> TaskResult[..., Any]:
            # The failure in question is recorded only once it is known what follows from it.
            return replace(self.result, errors=[*self.result.errors, error_of(failure)])

        wait = partial(delay_after, failures=self.claim.retries + 1, exception=error, result=result)
        try:
            return wait(self.definition.backoff)
        except BaseException:
            logger.exception("The backoff of %s failed; the default decides.", self.claim.task_path)
            return wait(DEFAULT_BACKOFF)

    def _running_result(self) -> TaskResult[..., Any]:
        claim = self.claim
        failures = [] if claim.is_first else _failures_before(claim, self.using)
        return make_result(
            as_called(
                self.definition,
                priority=claim.priority,
                queue_name=claim.queue,
                run_after=claim.date("run_after"),
                max_attempts=claim.max_retries + 1,
            ),
            id=claim.id,
            status="RUNNING",
            args=self.args,
            kwargs=self.kwargs,
            backend=claim.backend,
            enqueued_at=claim.date("enqueued_at"),
            started_at=claim.date("started_at"),
            last_attempted_at=claim.date("last_attempted_at"),
            errors=[error for error, _ in failures],
            worker_ids=[*(worker for _, worker in failures), str(claim.worker)],
        )


def held(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, or a coroutine function, that holds an advisory lock while it runs.

    What waits for the lock waits here, in the time of the attempt. The lock key has kept other tasks of this name from
    threads already, so that one of them waits at most.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with lock(name):
            return function(*args, **kwargs)

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        async with lock(name):
            return await function(*args, **kwargs)

    return call_async if iscoroutinefunction(function) else call


def prepare(claim: Claim, using: str) -> Attempt | Ending:
    """Return the attempt that a claim stands for, or its ending when it cannot even begin."""
    if claim.is_cancelled:
        return Ending(claim, Cancelled(Failure.of(TaskCancelled())))
    try:
        return Attempt(claim, using)
    except DatabaseFailure:
        # The attempts before this one cannot be read: the database is away, and the task has not begun.
        return Ending(claim, Released())
    except Exception as error:  # noqa: BLE001 - rows may be anybody's, and so is the code that makes values of them
        return Ending(claim, Failed(Failure.of(error)))


def break_off(claims: Sequence[Claim], error: BaseException) -> Ending:
    """Return the ending of claims of which ``error`` is all that is known: it came from our own code, or past it."""
    outcome = Failed(Failure.of(error))
    ending, *companions = (Ending(claim, outcome) for claim in claims)
    ending.companions = companions
    return ending


def run(attempt: Attempt, call: Callable[[Attempt], Any]) -> Ending:
    """Run a sync function to its end. ``call`` calls it so that it can be interrupted."""
    if attempt.is_atomic:
        return _run_atomic(attempt, call)
    try:
        outcome = attempt.success(call(attempt))
    except BaseException as error:  # noqa: BLE001 - see the top of the module
        outcome = attempt.failure(error)
    return attempt.ending(outcome)


async def run_async(attempt: Attempt, call: Callable[[Attempt], Awaitable[Any]]) -> Ending:
    """Run an async function to its end. ``call`` calls it so that it can be interrupted."""
    try:
        outcome = attempt.success(await call(attempt))
    except BaseException as error:  # noqa: BLE001 - see the top of the module
        outcome = attempt.failure(error)
    return attempt.ending(outcome)


def _run_atomic(attempt: Attempt, call: Callable[[Attempt], Any]) -> Ending:
    """Run a function in a transaction whose last statement settles its own claim.

    So its database effects and its completion are committed together or not at all. A worker that was taken for dead
    finds its claim gone, and everything rolls back.
    """
    claim = attempt.claim
    session: Any = None
    has_begun = has_committed = False

    def note_commit() -> None:
        nonlocal has_committed
        has_committed = True

    try:
        connection = connection_for(attempt.using)
        connection.ensure_connection()
        session = connection.connection
        with transaction.atomic(using=attempt.using, durable=True):
            has_begun = True
            # The first hook, so it is called whatever those of the function do.
            transaction.on_commit(note_commit, using=attempt.using)
            outcome = attempt.success(call(attempt))
            if not isinstance(outcome, Succeeded):
                transaction.set_rollback(True, using=attempt.using)
                return attempt.ending(outcome)
            _settle_and_commit(attempt, outcome)
    except ClaimLost:
        return attempt.ending(None)
    except BaseException as error:
        if has_committed:
            logger.exception("An on_commit hook of %r failed; the task has succeeded.", claim, extra=claim.log_fields())
            return attempt.ending(outcome, is_settled=True)
        if isinstance(error, DatabaseFailure) and (session is None or session.closed):
            # Cut off. Whether the commit arrived is not known, but the guard of the next statement knows.
            return attempt.ending(attempt.interruption(error) if has_begun else Released())
        return attempt.ending(attempt.failure(error))
    return attempt.ending(outcome, is_settled=True)


def _settle_and_commit(attempt: Attempt, outcome: Outcome) -> None:
    if told := [each for each in attempt.claims if each.progress is not each.noted_progress]:
        note_progress(attempt.using, told, is_last=True)
    successes: Any = attempt.outcomes(outcome)
    settle_and_commit(attempt.using, successes)


def _failures_before(claim: Claim, using: str) -> list[tuple[Any, str]]:
    rows = apps.get_model("django_pglock", "Attempt").objects.using(using).filter(task=claim.id).order_by("number")
    return [(error_of(row), str(row.worker)) for row in rows]
