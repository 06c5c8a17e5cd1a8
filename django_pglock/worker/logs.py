"""The worker's log: the record of a claim, and the records that are not made because no handler would take them.

``django.tasks`` logs the start and the end of each task. With Django's default settings the handler drops both when
DEBUG is off, and making them took a third of a worker's time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from django_pglock.store.outcome import Failure
from django_pglock.tasks.claim import Claim

logger = logging.getLogger("django_pglock.worker")

#: The loggers of the two packages that ``django.tasks`` comes from.
NAMES = ("django.tasks", "django_tasks")


def log_claim(level: int, claim: Claim, text: str, *values: Any, failure: Failure | None = None) -> None:
    """Log one sentence about a claim, which is its subject, with its fields and, of a failure, the stored traceback."""
    if not logger.isEnabledFor(level):
        return
    error = None if failure is None else failure.exception
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    args, extra = (claim, *values), claim.log_fields()
    record = logger.makeRecord(logger.name, level, __file__, 0, f"%s {text}.", args, exc_info, "log_claim", extra)
    if failure is not None:
        # The text that was stored: no handler fails at it, and no handler runs the user's code to make it.
        record.exc_text = failure.traceback.rstrip("\n")
    logger.handle(record)


def silence_unhandled_loggers() -> list[str]:
    """Raise the level of django.tasks' loggers to WARNING where no handler takes anything below. Returns their names.

    Only for a process that belongs to the worker. A logger whose level is set is not changed. No logger is changed
    where other code has replaced the way to the handlers, as error trackers do that collect log records.
    """
    if logging.Logger.callHandlers.__module__ != "logging":
        return []
    silenced = [name for name in NAMES if not logging.getLogger(name).level and not is_handled(name, logging.INFO)]
    for name in silenced:
        logging.getLogger(name).setLevel(logging.WARNING)
    return silenced


def keep_off_terminal() -> None:
    """Write the records of django.tasks to no terminal, because the worker's own log says the same in its own format.

    Other handlers, such as the one that mails errors to the admins, still get them.
    """
    for name in NAMES:
        for handler in _handlers_of(name):
            if isinstance(handler, logging.StreamHandler):
                handler.addFilter(_is_of_others)
        if not logging.getLogger(name).hasHandlers():
            # Without any handler Python would write warnings and errors to the terminal.
            logging.getLogger(name).addHandler(logging.NullHandler())


def _is_of_others(record: logging.LogRecord) -> bool:
    return record.name not in NAMES


def is_handled(name: str, level: int) -> bool:
    """Say whether some handler would take a record of this logger and level."""
    if not logging.getLogger(name).isEnabledFor(level):
        return False
    record = logging.getLogger(name).makeRecord(name, level, "", 0, "", (), None)
    return any(level >= handler.level and handler.filter(record) for handler in _handlers_of(name))


def _handlers_of(name: str) -> Iterator[logging.Handler]:
    """Yield the handlers that get the records of a logger: its own, and those of the loggers above it."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        yield from (each for each in logger.handlers if not isinstance(each, logging.NullHandler))
        logger = logger.parent if logger.propagate else None
