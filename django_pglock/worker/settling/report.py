"""Telling others: signals, logs and counts, at one place. Nothing here may harm a task."""

from __future__ import annotations

import logging
from typing import Any

from django.dispatch import Signal

from django_pglock.errors import TaskCancelled
from django_pglock.store.outcome import (
    Abandoned,
    Cancelled,
    Failed,
    Failure,
    Interrupted,
    Released,
    Retried,
    Snoozed,
    Succeeded,
)
from django_pglock.tasks import registry
from django_pglock.tasks.arguments import from_json
from django_pglock.tasks.claim import Claim, date_of
from django_pglock.tasks.compat import TaskResult, TaskResultStatus, task_backends, task_finished
from django_pglock.tasks.results import error_of
from django_pglock.worker.in_flight import Ending

logger = logging.getLogger("django_pglock.worker")


def sender_of(claim: Claim) -> type[Any]:
    """Return the class that django.tasks' signals name as their sender: the backend's.

    For a backend that TASKS does not have, or no longer has, that of the function.
    """
    definition = registry.find(claim.task_path)
    if definition is None or claim.backend in task_backends.settings:
        return type(task_backends[claim.backend])
    return type(definition.get_backend())


def tell(signal: Signal, claim: Claim, result: TaskResult[..., Any]) -> None:
    """Send one of the signals of django.tasks. No receiver harms a task, nor the thread that sends it."""
    try:
        answers = signal.send_robust(sender_of(claim), task_result=result)
    except BaseException:
        # Django catches what is an Exception, and goes on with the next receiver.
        logger.exception("A receiver that %r was told to ended it for those after it.", claim)
        return
    for receiver, answer in answers:
        if isinstance(answer, Exception):
            # Django's own log of it goes where nobody reads it unless DEBUG is on.
            name = getattr(receiver, "__qualname__", type(receiver).__qualname__)
            failure = Failure.of(answer)
            _log(logging.ERROR, claim, "told a receiver %s, which raised: %s", name, failure.message, failure=failure)


def announce(ending: Ending) -> None:
    """Say what became of a claim whose outcome was accepted: one line of the log, and the signal of django.tasks.

    docs/logging.md lists the lines.
    """
    if ending.result is None and isinstance(ending.outcome, Succeeded):
        # Most that end are these, and of most nobody hears.
        return
    claim, after = ending.claim, _after(ending)
    match ending.outcome:
        case Succeeded(result):
            _log(logging.DEBUG, claim, "succeeded%s", after)
            _finish(ending, TaskResultStatus.SUCCESSFUL, value=from_json(result) if result != "null" else None)
        case Failed(failure):
            _log(logging.ERROR, claim, "failed%s: %s", after, failure.message, failure=failure)
            _finish(ending, TaskResultStatus.FAILED, failure=failure)
        case Retried(failure, delay):
            text = "failed%s and will be tried again in %.1f s: %s"
            _log(logging.WARNING, claim, text, after, delay, failure.message, failure=failure)
        case Snoozed(delay):
            _log(logging.INFO, claim, "asked%s to be run again in %.1f s", after, delay)
        case Cancelled(failure):
            _log(logging.INFO, claim, "was cancelled%s: %s", after, failure.message)
            _finish(ending, TaskResultStatus.FAILED, failure=failure)
        case Interrupted(_, delay):
            text = "was cut off from the database%s and will run again in %.1f s"
            _log(logging.WARNING, claim, text, after, delay)
        case Abandoned(delay):
            _log(logging.INFO, claim, "had not ended with its process and will run again in %.1f s", delay)
        case Released():
            _log(logging.DEBUG, claim, "was given back before it began")


def announce_lost(ending: Ending) -> None:
    """Say that a claim was no longer ours: what came of it has been dropped."""
    _log(logging.WARNING, ending.claim, "was lost: somebody else has the task, its outcome was dropped")


def _log(level: int, claim: Claim, text: str, *values: Any, failure: Failure | None = None) -> None:
    if not logger.isEnabledFor(level):
        return
    error = None if failure is None else failure.exception
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    args, extra = (claim, *values), claim.log_fields()
    record = logger.makeRecord(logger.name, level, __file__, 0, f"%s {text}.", args, exc_info, "announce", extra)
    if failure is not None:
        # As it was stored: whatever the exception's text is, no handler fails at it, and none runs code of the user's.
        record.exc_text = failure.traceback.rstrip("\n")
    logger.handle(record)


def _after(ending: Ending) -> str:
    return "" if ending.seconds is None else f" after {ending.seconds:.3f} s"


def _finish(ending: Ending, status: TaskResultStatus, *, value: Any = None, failure: Failure | None = None) -> None:
    result = ending.result
    if result is None:
        return
    object.__setattr__(result, "status", status)
    object.__setattr__(result, "finished_at", date_of(ending.finished_at))
    object.__setattr__(result, "_return_value", value)
    if failure is None:
        tell(task_finished, ending.claim, result)
        return
    result.errors.append(error_of(failure))
    _tell_of_failure(ending.claim, result, failure)


def _tell_of_failure(claim: Claim, result: TaskResult[..., Any], failure: Failure) -> None:
    """Send ``task_finished`` where ``sys.exc_info()`` is the exception, as Django does and its log of tasks expects."""
    error = failure.exception or TaskCancelled()
    trace = error.__traceback__
    try:
        raise error  # noqa: TRY301 - to be caught right here is what it is for
    except BaseException:  # noqa: BLE001 - whatever the function raised
        # Without this frame, which tells nobody anything.
        error.__traceback__ = trace
        tell(task_finished, claim, result)
