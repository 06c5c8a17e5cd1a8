"""One attempt: the function with its arguments, whether it must stop, and the outcome for the way in which it ended."""

from __future__ import annotations

import copy
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

from django_pglock.error_reading import following, storable, traceback_of
from django_pglock.errors import (
    TaskArgumentsError,
    TaskCancelled,
    TaskExpired,
    TaskOptionError,
    TaskResultError,
    TaskStopped,
    TaskTimeout,
    TooManySnoozes,
)
from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.stopping import current_attempt
from django_pglock.store.attempts import attempts_before
from django_pglock.store.outcome import (
    SUCCEEDED,
    Cancelled,
    Failed,
    Failure,
    GivenBack,
    Mixed,
    Outcome,
    Retried,
    Snoozed,
    Succeeded,
)
from django_pglock.store.rescue import LONGEST_PAUSE, interrupted
from django_pglock.store.steps import RecordedSteps
from django_pglock.tasks import instrumentation, registry
from django_pglock.tasks.arguments import from_json, to_json
from django_pglock.tasks.call_keys import keys_of
from django_pglock.tasks.calls import Calls
from django_pglock.tasks.claim import Claim, TaskContext, running_claim
from django_pglock.tasks.compat import TaskResult
from django_pglock.tasks.fields import TaskFields
from django_pglock.tasks.instrumentation import UNOBSERVED
from django_pglock.tasks.results import as_called, error_of, make_result
from django_pglock.tasks.retry import DEFAULT_BACKOFF, MAX_DELAY, Cancel, FlowWord, Retry, Snooze, delay_after
from django_pglock.tasks.step_records import HandedBack, Suspension
from django_pglock.tasks.steps import Steps
from django_pglock.worker.child.in_flight import EndedClaim
from django_pglock.worker.child.logs import has_observers

logger = get_logger(WORKER)

#: The steps of functions without a context.
NO_STEPS = Steps(refusal="the function has no context.")

#: The options of a task without options. It must not be changed.
NOTHING: dict[str, Any] = {}

#: Snoozes may have no end. Without a wait, one task would take hundreds of claims a second. So a shorter wait is this
#: long, and twice as long each time.
LEAST_SNOOZE = 0.1


class Attempt:
    """One attempt of one claim: the function, its decoded arguments, and its result object.

    It is also a context: that of the call of its function, by its ``runner``. An exception that leaves the context is
    the error to record. If the function has a group, the claims of ``others`` are part of the same call. Its return
    value is the result of each claim. If it raises, each claim fails or is retried by its own retries.
    """

    #: The thread or the coroutine that runs it: see ``runners.py``.
    runner: Any
    #: The attempts of the other claims of a group call.
    others: Sequence[Attempt] = ()
    #: The errors of calls of a group that have failed by themselves, by their places. None: there is no group.
    errors: dict[int, Exception] | None = None
    #: The number of seconds that the function may take; None: any.
    timeout: float | None = None
    #: When the function was called, by time.monotonic(). An error before is no failure of it.
    began: float | None = None
    #: When the time of the attempt is over, and when the watchdog checks it next, by time.monotonic().
    deadline = math.inf
    check_at = math.inf
    #: The function has ended.
    is_over = False
    #: The function still runs ``grace_period`` seconds of the watchdog after its timeout. Its process ends.
    is_long_overdue = False
    #: psycopg's connections whose sockets were shut down, because a cancel did not end their statements.
    shut_down: tuple[Any, ...] = ()
    #: The call failed because its session to the tasks' database led to a standby.
    has_met_standby = False
    #: The error for which the outcome was made.
    error: BaseException | None = None
    #: The observers of the call, once it has begun.
    observed = UNOBSERVED
    #: The log records of the call, if its function has ``capture_logs``.
    logs: CapturedLogs | None = None

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
        if (self.args and definition.group is not None) or (self.is_atomic and registry.is_async(claim.task_path)):
            self._refuse_row()
        #: Whether there are observers of its start and its success. A failure is always reported.
        self.has_observers = has_observers()
        # Earlier attempts are read now. If this fails, the function has not begun, and the claim is given back.
        self._result = self._running_result() if self.has_observers or not claim.is_first else None
        self.steps = self._steps_of() if definition.takes_context else NO_STEPS

    def _steps_of(self) -> Steps:
        """Return the steps of the task. Reads those of earlier runs."""
        if self.is_atomic or self.definition.group is not None:
            what = "atomic" if self.is_atomic else "called for a group"
            return Steps(refusal=f"{self.claim.task_path} is {what}, and so is one step itself.")
        return RecordedSteps(self.using, self.claim, self.definition)

    def _refuse_row(self) -> NoReturn:
        """Refuse a row of other code that the present code cannot run as its caller has meant it."""
        where = f"Task {self.claim.id} was enqueued by another version of {self.claim.task_path}"
        if self.args and self.definition.group is not None:
            raise TaskArgumentsError(
                f"{where}, with positional arguments. The present version has a group, so its calls take only keyword "
                "arguments. Enqueue the call again with names, or retry the task with the other version."
            )
        raise TaskOptionError(
            f"{where}, with atomic=True. The present version is a coroutine function, which has no transaction. "
            "Enqueue the call again without atomic, or retry the task with the other version."
        )

    def expired(self) -> TaskExpired | None:
        """Return the error of a task that had not begun by its ``expires``; None for every other task."""
        expires = self.options.get("expires", self.definition.expires)
        if expires is None or self.claim.started_at is not None:
            return None
        is_date = isinstance(expires, str)
        end = datetime.fromisoformat(expires).timestamp() if is_date else float(self.claim.enqueued_at) + expires
        # Both are of the server's clock.
        late = float(self.claim.last_attempted_at) - end
        return TaskExpired(f"The task began {late:.0f} s after its expires, so it does not run.") if late > 0 else None

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

    # The call, and its end

    def __enter__(self) -> None:
        current_attempt.set(self)
        # First note the attempt, then call() checks whether it is cancelled. A cancel does both in the other order.
        self.runner.attempt = self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        runner = self.runner
        if runner.is_forked:
            end_process(error)
        try:
            if error is not None:
                if (reason := self.reason_of(error)) is not error:
                    raise reason
            elif self.timeout is not None and self.is_overdue:
                # It is no success, whatever it returned.
                raise self.timed_out()
        finally:
            self.is_over = True
            runner.release()
            if self.timeout is not None:
                if not self.is_overdue:
                    # It has ended in time, so the deadline means nothing more.
                    self.deadline = math.inf
                runner.watchdog.forget(self)
            current_attempt.set(None)

    def call(self) -> Any:
        """Call the function. For an async function this returns the coroutine."""
        self.begin()
        running_claim.set(self.claim)
        function = self.definition.func
        if self.definition.advisory:
            function = under_lock(self._lock_name(), function)
        if self.definition.takes_context:
            self.steps.start(self._has_to_end)
            context = TaskContext(
                task_result=self.result,
                _claims=self.claims,
                _steps=self.steps,
                _reason_to_stop=self.reason_to_stop,
            )
            return function(context, *self.args, **self.kwargs)
        return function(*self.args, **self.kwargs)

    def begin(self) -> None:
        """Start the clock of the attempt. Raises ``TaskCancelled`` if the function must not be called."""
        if self.is_cancelled:
            raise TaskCancelled
        now = time.monotonic()
        if self.timeout is not None:
            self.deadline = self.check_at = now + self.timeout
            self.runner.watchdog.watch(self)
        self.began = now

    @property
    def claims(self) -> list[Claim]:
        """The claims of this attempt."""
        return [self.claim, *(other.claim for other in self.others)]

    @property
    def is_cancelled(self) -> bool:
        """Whether its task is cancelled. The cancel of one task of a group does not end the common call."""
        return self.claim.is_cancelled and all(other.claim.is_cancelled for other in self.others)

    @property
    def is_overdue(self) -> bool:
        """Whether the time of the attempt is over."""
        # Most attempts have no deadline, and do not read the clock.
        return self.deadline < math.inf and time.monotonic() >= self.deadline

    def timed_out(self) -> TaskTimeout:
        """Return the error of an attempt whose time is over."""
        return TaskTimeout(f"The attempt took longer than its timeout of {self.timeout:g} s.")

    def check(self) -> None:
        """Raise ``TaskStopped`` if the function must end."""
        if (reason := self.reason_to_stop()) is not None:
            raise TaskStopped(reason)

    def _has_to_end(self) -> bool:
        """Return whether the process must end, so that another one continues the task. Raise if the function must."""
        self.check()
        return bool(self.runner.watchdog.is_stopping)

    def reason_to_stop(self) -> TaskTimeout | TaskCancelled | None:
        """Return the error for a function that checks whether it may continue; None: it may."""
        if self.is_cancelled:
            return TaskCancelled()
        return self.timed_out() if self.is_overdue else None

    def reason_of(self, error: BaseException) -> BaseException:
        """Return the error to record for an exception of the function.

        If the attempt had to stop, this is the reason for the stop, with the exception as its cause.
        """
        if type(error) is TaskStopped:
            error = reason_in(error)
        reason = self.reason_to_stop()
        # A function whose time is over may still decide how its task continues. A cancel is not its decision.
        if reason is None or isinstance(error, type(reason)):
            return error
        if isinstance(reason, TaskTimeout) and isinstance(error, FlowWord):
            return error
        reason.__cause__ = error
        return reason

    def _lock_name(self) -> str:
        """Return the name of the advisory lock to hold. A row from before ``lock=`` was added has no key."""
        claim = self.claim
        return claim.lock_key or str(
            keys_of(self.definition, tuple(from_json(claim.args)), from_json(claim.kwargs)).lock
        )

    def include(self, others: Sequence[Attempt]) -> None:
        """Make this the attempt of a group. Its function gets the list of the keyword arguments of all calls."""
        self.others, self.errors = others, {}
        calls = [self.kwargs, *(other.kwargs for other in others)]
        self.args, self.kwargs = [Calls(calls, self.errors, self.using if self.is_atomic else None)], {}

    def ended(self, outcome: Outcome | Mixed | None, *, is_settled: bool = False) -> EndedClaim:
        """Return the claim of this attempt as ended, with a result object if there are observers."""
        running_claim.set(None)
        if self.observed is not UNOBSERVED:
            self.observed.ended(outcome)
        seconds = None if self.began is None else time.monotonic() - self.began
        if self.logs is not None:
            self.claim.log = self.logs.text() or ""
        elif isinstance(outcome, Succeeded) and not self.has_observers and not self.others:
            # Arguments by position, because arguments by name would take most of the time here.
            return EndedClaim(self.claim, outcome, None, is_settled, seconds)
        for other in self.others:
            other.began, other.logs = self.began, self.logs
            other.timeout, other.deadline = self.timeout, self.deadline
        own, *outcomes = outcome.each if isinstance(outcome, Mixed) else self._outcomes_for(outcome)
        if (failure := getattr(own, "failure", None)) is not None:
            # Instruments have seen them, and the next task has not begun.
            failure.clear_frames()
        pairs = zip(self.others, outcomes, strict=True)
        same_call = [other.ended(each, is_settled=is_settled) for other, each in pairs]
        return EndedClaim(self.claim, own, self.result, is_settled, seconds, same_call=same_call)

    def with_outcomes(self, outcome: Succeeded | Mixed) -> list[tuple[Claim, Outcome]]:
        """Return the claims, each with its outcome, for that of the function."""
        each = outcome.each if isinstance(outcome, Mixed) else [outcome] * (1 + len(self.others))
        return list(zip(self.claims, each, strict=True))

    def _outcomes_for(self, outcome: Outcome | None) -> list[Outcome | None]:
        """Return the outcomes of all claims if that of the function is ``outcome``."""
        if outcome is None and self.others:
            # A claim was lost, so the common transaction was rolled back. The guard of the settle finds which one.
            outcome = GivenBack()
        if self.error is None or not isinstance(outcome, Failed | Retried | Snoozed | Cancelled):
            return [outcome] * len(self.claims)
        return [outcome, *(other.failure(self.error) for other in self.others)]

    def success(self, value: Any) -> Succeeded | Mixed:
        """Return the outcome of a call that returned ``value``.

        Raises ``TaskResultError`` if it cannot be stored, and ``StepError`` if its steps do not allow this end.
        """
        if self.steps is not NO_STEPS:
            self.steps.finish()
        outcome = SUCCEEDED if value is None else self._success_with(value)
        if not self.errors:
            return outcome
        each = enumerate([self, *self.others])
        return Mixed([every.failure(self.errors[place]) if place in self.errors else outcome for place, every in each])

    def _success_with(self, value: Any) -> Succeeded:
        what = f"The return value of {self.claim.task_path}"
        try:
            return Succeeded(to_json(value, what=what, kind=TaskResultError))
        except TaskResultError:
            raise
        except BaseException as broken:  # to read a container may run the user's code
            raise TaskResultError(f"{what} cannot be read: {type(broken).__qualname__}.") from broken

    def failure(self, error: BaseException) -> Outcome:
        """Return the outcome of a call that raised ``error``, by the function's retry policy."""
        error = self.steps.what_left(error)
        if isinstance(error, HandedBack):
            return GivenBack()
        if isinstance(error, Suspension):
            return Snoozed(error.seconds, suspension=error)
        self.error = error
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


def reason_in(stopped: TaskStopped) -> BaseException:
    """Return the reason for a stop, with the traceback of the stop, and as its cause what the stop has replaced."""
    reason = stopped.reason.with_traceback(stopped.__traceback__)
    reason.__cause__ = following(stopped)
    return reason


def end_process(error: BaseException | None) -> NoReturn:
    """End this process, which a task has forked, with the exit code that Python would use.

    If it continued as a thread of the worker, it would settle the claim of its parent, and run the claims in the
    parent's inbox.
    """
    code = 0 if error is None else 1
    try:
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        elif error is not None:
            sys.stderr.write(traceback_of(error))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        # Also if the streams of the project raise.
        os._exit(code & 0xFF)


def under_lock(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function or coroutine function that holds an advisory lock while it runs.

    The wait for the lock counts as time of the attempt. Tasks with the same lock name have the same lock key. So at
    most one of them is claimed, and at most one thread waits here.
    """
    # Not imported at module level, because most workers run no such task, and need no memory for the code of locks.
    from django_pglock.locks.api import lock

    # The braces of a key are no fields of a template.
    return lock(name.replace("{", "{{").replace("}", "}}"))(function)


def _failures_before(claim: Claim, using: str) -> list[tuple[Any, str]]:
    return [(error_of(row), str(row.worker)) for row in attempts_before(using, claim.id)]


# The log records of one attempt, for functions with ``capture_logs``.
#
# The factory that makes all records of the process knows the attempt by a context variable. So records of the
# function's thread or coroutine are captured, and those of calls that copy the context, such as ``sync_to_async``. It
# is installed when the first such function runs, so other workers have no cost.


#: The number of last records that are kept, and the largest number of characters of each record and of all together.
MOST_RECORDS, LONGEST_RECORD, MOST_CHARACTERS = 200, 4_000, 32_000

_FORMAT = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
_FORMAT.converter = time.gmtime


class CapturedLogs:
    """The last records of one attempt, of a level and higher."""

    def __init__(self, level: int) -> None:
        self.level = level
        self._texts: deque[str] = deque(maxlen=MOST_RECORDS)

    def add(self, record: logging.LogRecord) -> None:
        """Keep a record as text. A record that cannot be formatted is kept with the reason."""
        try:
            # A copy, because a formatter stores the text of the traceback in the record, where other handlers read it.
            text = _FORMAT.format(copy.copy(record))
        except Exception as error:  # noqa: BLE001 - see below
            # The arguments of a record are the project's objects.
            text = f"{record.levelname} {record.name}: the record cannot be formatted ({type(error).__qualname__})"
        self._texts.append(text if len(text) <= LONGEST_RECORD else f"{text[:LONGEST_RECORD]}…")

    def text(self) -> str | None:
        """Return the records as text, the newest last; None if there are none."""
        text = "\n".join(self._texts)
        return storable(text if len(text) <= MOST_CHARACTERS else f"…{text[-MOST_CHARACTERS:]}") or None


def capture(level: int) -> CapturedLogs:
    """Return what keeps the records of an attempt. From now on, the factory of records looks for it."""
    global make_record
    if make_record is None:
        make_record = logging.getLogRecordFactory()
        logging.setLogRecordFactory(_make_and_capture)
    return CapturedLogs(level)


#: The factory of records that was there before ours.
make_record: Callable[..., logging.LogRecord] | None = None


def _make_and_capture(*args: Any, **kwargs: Any) -> logging.LogRecord:
    record = make_record(*args, **kwargs)  # type: ignore[misc]
    logs = getattr(current_attempt.get(), "logs", None)
    if logs is not None and record.levelno >= logs.level:
        logs.add(record)
    return record
