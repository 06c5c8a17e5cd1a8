"""What others see of a claim: records in the worker's log, and the signals of django.tasks."""

from __future__ import annotations

import logging
import math
import time
from typing import Any
from weakref import ReferenceType

from django.dispatch import Signal

from django_pglock.errors import TaskCancelled
from django_pglock.loggers import WORKER, get_logger
from django_pglock.store.outcome import (
    Abandoned,
    Cancelled,
    Failed,
    Failure,
    GivenBack,
    Interrupted,
    Retried,
    Snoozed,
    Succeeded,
)
from django_pglock.tasks import registry
from django_pglock.tasks.arguments import from_json
from django_pglock.tasks.claim import Claim, date_of
from django_pglock.tasks.compat import (
    BaseTaskBackend,
    TaskResult,
    TaskResultStatus,
    task_backends,
    task_finished,
    task_started,
)
from django_pglock.tasks.results import error_of
from django_pglock.worker.child.in_flight import EndedClaim

logger = get_logger(WORKER)


def log_claim(level: int, claim: Claim, text: str, *values: Any, failure: Failure | None = None) -> None:
    """Log a sentence whose subject is a claim, with the fields of the claim and the stored traceback of a failure."""
    if not logger.isEnabledFor(level):
        return
    error = None if failure is None else failure.exception
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    args, extra = (claim, *values), claim.log_fields()
    # The message of an exception, which is the last value, may be a sentence with its own full stop.
    end = "" if text.endswith("%s") and str(values[-1]).endswith((".", "!", "?")) else "."
    record = logger.makeRecord(logger.name, level, __file__, 0, f"%s {text}{end}", args, exc_info, "log_claim", extra)
    if failure is not None:
        # The stored text. So no handler formats the exception, which could run the user's code and fail.
        record.exc_text = failure.traceback.rstrip("\n")
    logger.handle(record)


#: Seconds between two checks for observers. A check for each task would take a tenth of the worker's time.
CHECK_INTERVAL = 0.01
#: "django.tasks" or "django_tasks": the name of the package and of its logger.
PACKAGE = BaseTaskBackend.__module__.partition(".backends")[0]
PACKAGE_LOGGER = logging.getLogger(PACKAGE)


def send(signal: Signal, claim: Claim, result: TaskResult[..., Any]) -> None:
    """Send one of the signals of django.tasks. An error of a receiver affects neither a task nor the calling thread."""
    try:
        answers = signal.send_robust(sender_of(claim), task_result=result)
    except BaseException:
        # Django catches each Exception and continues with the next receiver. So this is a SystemExit or the like.
        logger.exception("A signal receiver for %s raised a BaseException, so later receivers were not called.", claim)
        return
    for receiver, answer in answers:
        if isinstance(answer, Exception):
            # Django logs this as well, but its logger has no handler unless DEBUG is on.
            name = getattr(receiver, "__qualname__", type(receiver).__qualname__)
            failure = Failure.of(answer)
            log_claim(
                logging.ERROR,
                claim,
                "was sent to signal receiver %s, which raised: %s",
                name,
                failure.message,
                failure=failure,
            )


def sender_of(claim: Claim) -> type[Any]:
    """Return the sender of the signals of django.tasks: the class of the task's backend.

    If the backend is not in TASKS, it is the class of the function's backend.
    """
    definition = registry.find(claim.task_path)
    if definition is None or claim.backend in task_backends.settings:
        return type(task_backends[claim.backend])
    return type(definition.get_backend())


class Observers:
    """Whether there are observers of the start or the success of a task.

    Observers are receivers of the signals, and the worker's log at DEBUG. The log of django.tasks is an observer, too:
    its records are made by receivers of the signals.
    """

    def __init__(self) -> None:
        #: When they were last searched, by time.monotonic(). Minus infinity: search at the next call.
        self.checked_at, self._exist = -math.inf, True

    def exist(self) -> bool:
        """Return whether there are observers, as of at most ``CHECK_INTERVAL`` seconds ago."""
        now = time.monotonic()
        if now - self.checked_at >= CHECK_INTERVAL:
            self.checked_at = now
            is_logged = PACKAGE_LOGGER.isEnabledFor(logging.INFO) or logger.isEnabledFor(logging.DEBUG)
            self._exist = is_logged or any(map(_has_receivers, (task_started, task_finished)))
        return self._exist


def _has_receivers(signal: Signal) -> bool:
    return any(_module_of(entry[1]) != f"{PACKAGE}.signals" for entry in signal.receivers)


def _module_of(receiver: Any) -> str | None:
    function = receiver() if isinstance(receiver, ReferenceType) else receiver
    return getattr(function, "__module__", None)


#: Signals and loggers are global in a process, so one object is enough.
observers = Observers()
has_observers = observers.exist


# Reports the end of a claim: in the worker's log, and by the signal of django.tasks. An error here affects no task.
#
# docs/admin.md lists the log messages.


def report(ended: EndedClaim) -> None:
    """Report a claim whose outcome was accepted: log one line, and send ``task_finished`` if the task has finished."""
    if ended.result is None and isinstance(ended.outcome, Succeeded):
        # This is so for most claims: a success without observers.
        return
    claim, after = ended.claim, _after(ended)
    match ended.outcome:
        case Succeeded(result):
            log_claim(logging.DEBUG, claim, "succeeded%s", after)
            _finish(ended, TaskResultStatus.SUCCESSFUL, value=from_json(result) if result != "null" else None)
        case Failed(failure):
            log_claim(logging.ERROR, claim, "failed%s: %s", after, failure.message, failure=failure)
            _finish(ended, TaskResultStatus.FAILED, failure=failure)
        case Retried(failure, delay):
            text = "failed%s and will run again in %.1f s: %s"
            log_claim(logging.WARNING, claim, text, after, delay, failure.message, failure=failure)
        case Snoozed(delay, suspension=how):
            what, when = (
                ("asked", f" to be run again in {delay:.1f} s") if how is None else ("was suspended", f": {how}")
            )
            log_claim(logging.INFO, claim, "%s%s%s", what, after, when)
        case Cancelled(failure):
            log_claim(logging.INFO, claim, "was cancelled%s: %s", after, failure.message)
            _finish(ended, TaskResultStatus.FAILED, failure=failure)
        case Interrupted(failure, delay):
            text = "was interrupted%s and will run again in %.1f s: %s"
            log_claim(logging.WARNING, claim, text, after, delay, failure.message)
        case Abandoned(delay):
            text = "was not finished by this process and will run again in %.1f s"
            log_claim(logging.INFO, claim, text, delay)
        case GivenBack():
            log_claim(logging.DEBUG, claim, "was given back")


def report_lost(ended: EndedClaim) -> None:
    """Report a claim whose outcome was dropped, because the task no longer belonged to the claim."""
    # Another worker may have rescued the task, or a person may have reset or deleted it. The row does not say which.
    text = "was lost: the task no longer belongs to this worker, so this outcome was dropped"
    log_claim(logging.WARNING, ended.claim, text)


def _after(ended: EndedClaim) -> str:
    return "" if ended.seconds is None else f" after {ended.seconds:.3f} s"


def _finish(ended: EndedClaim, status: TaskResultStatus, *, value: Any = None, failure: Failure | None = None) -> None:
    result = ended.result
    if result is None:
        return
    object.__setattr__(result, "status", status)
    object.__setattr__(result, "finished_at", date_of(ended.finished_at))
    object.__setattr__(result, "_return_value", value)
    if failure is None:
        send(task_finished, ended.claim, result)
        return
    result.errors.append(error_of(failure))
    _send_failure(ended.claim, result, failure)


def _send_failure(claim: Claim, result: TaskResult[..., Any], failure: Failure) -> None:
    """Send ``task_finished`` while ``sys.exc_info()`` is the exception, as Django does. Its log of tasks needs this."""
    # Not by its truth: an exception with a length of 0 is false.
    error = TaskCancelled() if failure.exception is None else failure.exception
    trace = error.__traceback__
    try:
        raise error  # noqa: TRY301 - raised in order to be caught here
    except BaseException:  # noqa: BLE001 - whatever the function raised
        # Without the frame of this function, which is of no use to a reader. In Python 3.10 the log still has it.
        error.with_traceback(trace)
        send(task_finished, claim, result)
