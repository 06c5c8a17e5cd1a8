"""Telling others: signals, logs and counts, at one place. Nothing here may harm a task."""

from __future__ import annotations

import logging
from typing import Any

from django.dispatch import Signal

from django_pglock.tasks import registry
from django_pglock.tasks.arguments import from_json
from django_pglock.tasks.claim import Claim, date_of
from django_pglock.tasks.compat import TaskError, TaskResult, TaskResultStatus, task_backends, task_finished
from django_pglock.tasks.outcome import (
    Abandoned,
    Cancelled,
    Failed,
    Interrupted,
    Released,
    Retried,
    Snoozed,
    Succeeded,
)
from django_pglock.tasks.results import error_of
from django_pglock.worker.hand import Ending

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
        signal.send_robust(sender_of(claim), task_result=result)
    except BaseException:
        # Django catches what is an Exception, and goes on with the next receiver.
        logger.exception("A receiver that %r was told to ended it for those after it.", claim)


def announce(ending: Ending) -> None:
    """Say what became of a claim whose outcome was accepted."""
    match ending.outcome:
        case Succeeded(result):
            # Most that end are these, and of most nobody hears.
            if ending.result is not None:
                _finish(ending, TaskResultStatus.SUCCESSFUL, value=from_json(result) if result != "null" else None)
        case Failed(failure):
            logger.error("%r failed: %s", ending.claim, failure.exception_path, extra=ending.claim.log_fields())
            _finish(ending, TaskResultStatus.FAILED, error=error_of(failure))
        case Retried(failure, delay):
            logger.warning(
                "%r failed with %s and will be tried again in %.1f s",
                ending.claim,
                failure.exception_path,
                delay,
                extra=ending.claim.log_fields(),
            )
        case Snoozed(delay):
            logger.info("%r asked to be run again in %.1f s", ending.claim, delay, extra=ending.claim.log_fields())
        case Cancelled(failure):
            logger.info("%r is cancelled: %s", ending.claim, failure.exception_path, extra=ending.claim.log_fields())
            _finish(ending, TaskResultStatus.FAILED, error=error_of(failure))
        case Interrupted(failure, delay):
            logger.warning(
                "%r was cut off from the database (%s) and will run again in %.1f s",
                ending.claim,
                failure.exception_path,
                delay,
                extra=ending.claim.log_fields(),
            )
        case Abandoned(delay):
            logger.info("%r will run again in %.1f s", ending.claim, delay, extra=ending.claim.log_fields())
        case Released():
            logger.debug("%r was given back", ending.claim, extra=ending.claim.log_fields())


def announce_lost(ending: Ending) -> None:
    """Say that a claim was no longer ours: what came of it has been dropped."""
    logger.warning(
        "%r was lost: somebody else has the task, its outcome was dropped.",
        ending.claim,
        extra=ending.claim.log_fields(),
    )


def _finish(ending: Ending, status: TaskResultStatus, *, value: Any = None, error: TaskError | None = None) -> None:
    result = ending.result
    if result is None:
        return
    object.__setattr__(result, "status", status)
    object.__setattr__(result, "finished_at", date_of(ending.finished_at))
    object.__setattr__(result, "_return_value", value)
    if error is not None:
        result.errors.append(error)
    tell(task_finished, ending.claim, result)
