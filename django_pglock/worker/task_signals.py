"""Sends the signals of django.tasks, if there are observers."""

from __future__ import annotations

import logging
import time
from typing import Any
from weakref import ReferenceType

from django.dispatch import Signal

from django_pglock.loggers import WORKER, get_logger
from django_pglock.store.outcome import Failure
from django_pglock.tasks import registry
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.compat import BaseTaskBackend, TaskResult, task_backends, task_finished, task_started
from django_pglock.worker.logs import log_claim

logger = get_logger(WORKER)

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
        self._checked_at = -CHECK_INTERVAL
        self._exist = True

    def exist(self) -> bool:
        """Return whether there are observers, as of at most ``CHECK_INTERVAL`` seconds ago."""
        now = time.monotonic()
        if now - self._checked_at >= CHECK_INTERVAL:
            self._checked_at = now
            self._exist = self._check()
        return self._exist

    def _check(self) -> bool:
        if PACKAGE_LOGGER.isEnabledFor(logging.INFO) or logger.isEnabledFor(logging.DEBUG):
            return True
        return any(map(_has_receivers, (task_started, task_finished)))


def _has_receivers(signal: Signal) -> bool:
    return any(_module_of(entry[1]) != f"{PACKAGE}.signals" for entry in signal.receivers)


def _module_of(receiver: Any) -> str | None:
    function = receiver() if isinstance(receiver, ReferenceType) else receiver
    return getattr(function, "__module__", None)


#: Signals and loggers are global in a process, so one object is enough.
has_observers = Observers().exist
