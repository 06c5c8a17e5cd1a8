"""One attempt of one claim: the function with its arguments, and the outcome for the way in which the call ended."""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

from django_pglock.error_reading import storable
from django_pglock.errors import TaskArgumentsError, TaskCancelled, TaskOptionError, TaskResultError, TooManySnoozes
from django_pglock.loggers import WORKER, get_logger
from django_pglock.store.attempts import attempts_before
from django_pglock.store.outcome import SUCCEEDED, Cancelled, Failed, Failure, Outcome, Retried, Snoozed, Succeeded
from django_pglock.store.rescue import LONGEST_PAUSE, interrupted
from django_pglock.tasks import instrumentation, registry
from django_pglock.tasks.arguments import from_json, to_json
from django_pglock.tasks.call_keys import keys_of
from django_pglock.tasks.claim import Claim, TaskContext, running_claim
from django_pglock.tasks.compat import TaskResult
from django_pglock.tasks.fields import TaskFields
from django_pglock.tasks.instrumentation import UNOBSERVED
from django_pglock.tasks.results import as_called, error_of, make_result
from django_pglock.tasks.retry import DEFAULT_BACKOFF, MAX_DELAY, Cancel, Retry, Snooze, delay_after
from django_pglock.worker.child.in_flight import EndedClaim
from django_pglock.worker.child.logs import has_observers
from django_pglock.worker.child.stoppable import StoppableAttempt

logger = get_logger(WORKER)

#: The options of a task without options. It must not be changed.
NOTHING: dict[str, Any] = {}

#: Snoozes may have no end. Without a wait, one task would take hundreds of claims a second. So a shorter wait is this
#: long, and twice as long each time.
LEAST_SNOOZE = 0.1


class Attempt(StoppableAttempt):
    """One attempt of one claim: the function, its decoded arguments, and its result object."""

    #: The observers of the call, once it has begun.
    observed = UNOBSERVED
    #: The log records of the call, if its function has ``capture_logs``.
    logs: CapturedLogs | None = None
    #: The function was called. An error before is no failure of it.
    was_called = False
    #: The call failed because its session to the tasks' database led to a standby.
    has_met_standby = False

    def __init__(self, claim: Claim, using: str) -> None:
        definition = registry.find(claim.task_path)
        if definition is None:
            raise LookupError(f"{claim.task_path} is not registered")
        self.claim = claim
        self.using = using
        self.definition: TaskFields = definition
        meta: dict[str, Any] = NOTHING if claim.meta == "{}" else from_json(claim.meta)
        self.options: dict[str, Any] = meta.get("options", NOTHING)
        #: How often the task has snoozed, if that is limited.
        self.snoozes: int = meta.get("snoozes", 0)
        self.timeout = self.options.get("timeout", definition.timeout)
        #: Whether the function and the settle of its claim share a transaction.
        self.is_atomic = bool(self.options.get("atomic", definition.atomic))
        self.args: list[Any] = [] if claim.args == "[]" else from_json(claim.args)
        self.kwargs: dict[str, Any] = {} if claim.kwargs == "{}" else from_json(claim.kwargs)
        if not isinstance(self.args, list) or not isinstance(self.kwargs, dict):
            raise TypeError(f"Task {claim.id} has args that are not a list, or kwargs that are not an object.")
        self._check_row()
        #: Whether there are observers of its start and its success. A failure is always reported.
        self.has_observers = has_observers()
        # Earlier attempts are read now. If this fails, the function has not begun, and the claim is given back.
        self._result = self._running_result() if self.has_observers or not claim.is_first else None

    def _check_row(self) -> None:
        """Refuse a row of other code that the present code cannot run as its caller has meant it."""
        where = f"Task {self.claim.id} was enqueued by another version of {self.claim.task_path}"
        if self.definition.group is not None and self.args:
            raise TaskArgumentsError(
                f"{where}, with positional arguments. The present version has a group, so its calls take only keyword "
                "arguments. Enqueue the call again with names, or retry the task with the other version."
            )
        if self.is_atomic and registry.is_async(self.claim.task_path):
            raise TaskOptionError(
                f"{where}, with atomic=True. The present version is a coroutine function, which has no transaction. "
                "Enqueue the call again without atomic, or retry the task with the other version."
            )

    @property
    def result(self) -> TaskResult[..., Any]:
        """The result object of django.tasks. It is made when needed, because that costs as much as a small task."""
        if self._result is None:
            self._result = self._running_result()
        return self._result

    def observe(self) -> None:
        """Begin to observe the call. Called in the thread or coroutine in which the function runs."""
        if instrumentation.instruments:
            self.observed = instrumentation.observe_run(self)
        if self.definition.capture_logs is not None:
            self.logs = capture(int(self.definition.capture_logs))

    def call(self) -> Any:
        """Call the function. For an async function this returns the coroutine."""
        self.was_called = True
        running_claim.set(self.claim)
        function = self.definition.func
        if self.definition.advisory:
            function = under_lock(self._lock_name(), function)
        if self.definition.takes_context:
            context = TaskContext(task_result=self.result, _claims=self.claims, _reason_to_stop=self.reason_to_stop)
            return function(context, *self.args, **self.kwargs)
        return function(*self.args, **self.kwargs)

    def _lock_name(self) -> str:
        """Return the name of the advisory lock to hold. A row from before ``lock=`` was added has no key."""
        claim = self.claim
        return claim.lock_key or str(
            keys_of(self.definition, tuple(from_json(claim.args)), from_json(claim.kwargs)).lock
        )

    def outcomes(self, outcome: Outcome) -> list[tuple[Claim, Outcome]]:
        """Return the outcome of each claim of this attempt."""
        return [(self.claim, outcome)]

    def ended(self, outcome: Outcome | None, *, is_settled: bool = False) -> EndedClaim:
        """Return the claim of this attempt as ended, with a result object if there are observers."""
        running_claim.set(None)
        if self.observed is not UNOBSERVED:
            self.observed.ended(outcome)
        seconds = None if self.began is None else time.monotonic() - self.began
        if self.logs is not None:
            self.claim.log = self.logs.text() or ""
        elif isinstance(outcome, Succeeded) and not self.has_observers:
            # Arguments by position, because arguments by name would take most of the time here.
            return EndedClaim(self.claim, outcome, None, is_settled, seconds)
        return EndedClaim(self.claim, outcome, self.result, is_settled, seconds)

    def success(self, value: Any) -> Outcome:
        """Return the outcome of a call that returned ``value``: a failure if the value cannot be stored as JSON."""
        if value is None:
            return SUCCEEDED
        what = f"The return value of {self.claim.task_path}"
        try:
            return Succeeded(to_json(value, what=what, kind=TaskResultError))
        except TaskResultError as error:
            return self.failure(error)
        except BaseException as broken:  # noqa: BLE001 - to read a container may run the user's code
            refused = TaskResultError(f"{what} cannot be read: {type(broken).__qualname__}.")
            refused.__cause__ = broken
            return self.failure(refused)

    def failure(self, error: BaseException) -> Outcome:
        """Return the outcome of a call that raised ``error``, by the function's retry policy."""
        self.observed.raised(error)
        if isinstance(error, TaskResultError):
            # The function has returned, so neither its retry policy nor its timeout applies.
            return Failed(Failure.of(error))
        try:
            return self._failure(self.reason_of(error))
        except BaseException as broken:
            # Exception classes and retry policies are user code, which may raise.
            logger.exception("The retry options of %s raised an error. The task fails.", self.claim)
            return Failed(Failure.of(broken))

    def _failure(self, error: BaseException) -> Outcome:
        if self.has_met_standby:
            return interrupted(self.claim, error)
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
        delay = min(error.seconds, MAX_DELAY)
        if delay < LEAST_SNOOZE:
            delay = min(LEAST_SNOOZE * 2 ** min(self.claim.uncounted, 11), LONGEST_PAUSE)
        most = self.options.get("max_snoozes", self.definition.max_snoozes)
        if most is None:
            return Snoozed(delay)
        if self.snoozes < most:
            return Snoozed(delay, self.snoozes + 1)
        refused = TooManySnoozes(f"The task has already snoozed {most} times, its max_snoozes.")
        refused.__cause__ = error
        return Failed(Failure.of(refused))

    def _delay(self, error: BaseException, failure: Failure) -> float:
        if isinstance(error, Retry) and error.seconds is not None:
            return min(float(error.seconds), MAX_DELAY)

        def result() -> TaskResult[..., Any]:
            # The failure is not stored yet, because the backoff is part of its outcome.
            return replace(self.result, errors=[*self.result.errors, error_of(failure)])

        wait = partial(delay_after, failures=self.claim.retries + 1, exception=error, result=result)
        try:
            return wait(self.definition.backoff)
        except BaseException:
            logger.exception("The backoff of %s raised an error. The default backoff is used.", self.claim.task_path)
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
            args=self.args,
            kwargs=self.kwargs,
            errors=[error for error, _ in failures],
            worker_ids=[*(worker for _, worker in failures), str(claim.worker)],
            **claim.in_result(),
        )


def under_lock(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function or coroutine function that holds an advisory lock while it runs.

    The wait for the lock counts as time of the attempt. Tasks with the same lock name have the same lock key. So at
    most one of them is claimed, and at most one thread waits here.
    """
    # Not imported at module level, because most workers run no such task, and need no memory for the code of locks.
    from django_pglock.locks.api import lock

    def call(*args: Any, **kwargs: Any) -> Any:
        with lock(name):
            return function(*args, **kwargs)

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        async with lock(name):
            return await function(*args, **kwargs)

    return call_async if iscoroutinefunction(function) else call


def _failures_before(claim: Claim, using: str) -> list[tuple[Any, str]]:
    return [(error_of(row), str(row.worker)) for row in attempts_before(using, claim.id)]


# The log records of one attempt, for functions with ``capture_logs``.
#
# One handler at the root logger gets the records. A context variable has the attempt to which a record belongs. So
# records of the function's thread or coroutine are captured, and those of calls that copy the context, such as
# ``sync_to_async``. The handler is added when the first such function runs, so other workers have no cost.


#: The number of last records that are kept, and the largest number of characters of each record and of all together.
MOST_RECORDS, LONGEST_RECORD, MOST_CHARACTERS = 200, 4_000, 32_000

_FORMAT = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
_FORMAT.converter = time.gmtime


class CapturedLogs:
    """The last records of one attempt, of a level and higher."""

    def __init__(self, level: int) -> None:
        self.level = level
        self.count = 0
        self._texts: deque[str] = deque(maxlen=MOST_RECORDS)

    def add(self, record: logging.LogRecord) -> None:
        """Keep a record as text. A record that cannot be formatted is kept with the reason."""
        try:
            # A copy, because a formatter stores the text of the traceback in the record, where other handlers read it.
            text = _FORMAT.format(copy.copy(record))
        except Exception as error:  # noqa: BLE001 - see below
            # The arguments of a record are the project's objects.
            text = f"{record.levelname} {record.name}: the record cannot be formatted ({type(error).__qualname__})"
        self.count += 1
        self._texts.append(text if len(text) <= LONGEST_RECORD else f"{text[:LONGEST_RECORD]}…")

    def text(self) -> str | None:
        """Return the records as text, the newest last, and how many are missing; None if there are none."""
        kept: list[str] = []
        left = MOST_CHARACTERS
        for text in reversed(self._texts):
            left -= len(text) + 1
            if left < 0:
                break
            kept.append(text)
        if self.count > len(kept):
            kept.append(f"… {self.count - len(kept)} earlier records")
        return storable("\n".join(reversed(kept))) or None


_captured: ContextVar[CapturedLogs | None] = ContextVar("django_pglock_captured_logs", default=None)


class _Handler(logging.NullHandler):
    """Keeps the records of attempts. It needs no lock: a record is text in the deque of its attempt.

    It is a NullHandler, so that code that searches for handlers does not count it as one.
    """

    def handle(self, record: logging.LogRecord) -> bool:
        """Keep a record of an attempt. Print other records if Python would print them without this handler."""
        captured = _captured.get()
        if captured is not None and record.levelno >= captured.level:
            captured.add(record)
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and _is_alone(self, record.name):
            last.handle(record)
        return True


_handler = _Handler()


def capture(level: int) -> CapturedLogs:
    """Keep the records that are made in the current context from now on."""
    root = logging.getLogger()
    if _handler not in root.handlers:
        # At the first time, or after the project has configured its logging again.
        root.addHandler(_handler)
    captured = CapturedLogs(level)
    _captured.set(captured)
    return captured


def _is_alone(handler: logging.Handler, name: str) -> bool:
    """Return whether a record of a logger reaches no other handler. Python prints warnings that reach none."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(each is not handler for each in logger.handlers):
            return False
        logger = logger.parent if logger.propagate else None
    return True
