"""Reports the end of a claim: in the worker's log, and by the signal of django.tasks. An error here affects no task.

docs/logging.md lists the log messages.
"""

from __future__ import annotations

import logging
from typing import Any

from django_pglock.errors import TaskCancelled
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
from django_pglock.tasks.arguments import from_json
from django_pglock.tasks.claim import Claim, date_of
from django_pglock.tasks.compat import TaskResult, TaskResultStatus, task_finished
from django_pglock.tasks.results import error_of
from django_pglock.worker.ended_claim import EndedClaim
from django_pglock.worker.logs import log_claim
from django_pglock.worker.task_signals import send


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
        case Snoozed(delay):
            log_claim(logging.INFO, claim, "asked%s to be run again in %.1f s", after, delay)
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
