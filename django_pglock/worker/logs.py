"""Log records that nobody hears are not worth making.

``django.tasks`` logs the start and the end of each task. With Django's own default settings the handler drops both when
DEBUG is off, and making them took a third of a worker's time.
"""

from __future__ import annotations

import logging
import time
from typing import Any
from weakref import ReferenceType

from django.dispatch import Signal

from django_pglock.tasks.compat import BaseTaskBackend, task_finished, task_started

#: The loggers of the two packages that ``django.tasks`` comes from.
NAMES = ("django.tasks", "django_tasks")


def silence_what_nobody_hears() -> list[str]:
    """Raise the level of the tasks' loggers to WARNING where no handler takes anything below. Returns their names.

    For a process of our own only. A logger whose level is set is left alone, and all are where somebody has replaced
    the way to the handlers, as error trackers do that collect what was logged.
    """
    if logging.Logger.callHandlers.__module__ != "logging":
        return []
    silenced = [name for name in NAMES if not logging.getLogger(name).level and not is_heard(name, logging.INFO)]
    for name in silenced:
        logging.getLogger(name).setLevel(logging.WARNING)
    return silenced


def is_heard(name: str, level: int) -> bool:
    """Say whether some handler would take a record of this logger and level."""
    logger: logging.Logger | None = logging.getLogger(name)
    if logger is None or not logger.isEnabledFor(level):
        return False
    record = logger.makeRecord(name, level, "", 0, "", (), None)
    while logger is not None:
        if any(level >= handler.level and handler.filter(record) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


#: Seconds between two looks at who listens; a look for each task would take a tenth of the worker's time.
BETWEEN_LOOKS = 0.01


class Ear:
    """Whether anybody would hear of a task that starts or succeeds: a receiver, the worker's log at DEBUG, or the log
    of django.tasks, which is itself a receiver of the signals.
    """

    def __init__(self) -> None:
        self._looked_at = -BETWEEN_LOOKS
        self._found = True

    def hears(self) -> bool:
        """Say it, as of a moment ago."""
        now = time.monotonic()
        if now - self._looked_at >= BETWEEN_LOOKS:
            self._looked_at = now
            self._found = self._look()
        return self._found

    def _look(self) -> bool:
        if _LOGGER.isEnabledFor(logging.INFO) or _OWN_LOGGER.isEnabledFor(logging.DEBUG):
            return True
        return any(map(_has_receivers, (task_started, task_finished)))


#: "django.tasks" or "django_tasks": the package, its logger, and where its own receivers are.
_PACKAGE = BaseTaskBackend.__module__.partition(".backends")[0]
_LOGGER = logging.getLogger(_PACKAGE)
_OWN_LOGGER = logging.getLogger("django_pglock.worker")


def _has_receivers(signal: Signal) -> bool:
    return any(_module_of(entry[1]) != f"{_PACKAGE}.signals" for entry in signal.receivers)


def _module_of(receiver: Any) -> str | None:
    function = receiver() if isinstance(receiver, ReferenceType) else receiver
    return getattr(function, "__module__", None)


#: One for the process: signals and logs are the process's, too.
is_heard_of_tasks = Ear().hears
