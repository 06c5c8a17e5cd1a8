"""The worker's log: records about claims, and the levels of loggers whose records no handler takes.

``django.tasks`` logs the start and the end of each task. With Django's default settings and DEBUG off, the handler
drops both records. To make them took a third of a worker's time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from django_pglock.loggers import WORKER, get_logger
from django_pglock.store.outcome import Failure
from django_pglock.tasks.claim import Claim

logger = get_logger(WORKER)

#: The loggers of the two packages that ``django.tasks`` comes from.
NAMES = ("django.tasks", "django_tasks")


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


def silence_unhandled_loggers() -> list[str]:
    """Set the level of django.tasks' loggers to WARNING if no handler takes lower records. Return the loggers' names.

    Only for a process that belongs to the worker. A logger with a level is not changed. No logger is changed if other
    code has replaced the method that calls the handlers, as some error trackers do to collect log records.
    """
    if logging.Logger.callHandlers.__module__ != "logging":
        return []
    silenced = [name for name in NAMES if not logging.getLogger(name).level and not is_handled(name, logging.INFO)]
    for name in silenced:
        logging.getLogger(name).setLevel(logging.WARNING)
    return silenced


def keep_off_terminal() -> None:
    """Keep the records of django.tasks off the terminal, because the worker's own log has the same information.

    Other handlers, such as the one that mails errors to the admins, still get the records.
    """
    for name in NAMES:
        for handler in _handlers_of(name):
            if isinstance(handler, logging.StreamHandler):
                handler.addFilter(_is_of_others)
        if not logging.getLogger(name).hasHandlers():
            # Without a handler Python would write warnings and errors to the terminal.
            logging.getLogger(name).addHandler(logging.NullHandler())


def _is_of_others(record: logging.LogRecord) -> bool:
    return record.name not in NAMES


def is_handled(name: str, level: int) -> bool:
    """Return whether a handler would take a record of this logger and level."""
    if not logging.getLogger(name).isEnabledFor(level):
        return False
    try:
        record = logging.getLogger(name).makeRecord(name, level, "", 0, "", (), None)
        return any(level >= handler.level and handler.filter(record) for handler in _handlers_of(name))
    except Exception:  # noqa: BLE001 - a filter or a factory of records of the project raises
        return True


def _handlers_of(name: str) -> Iterator[logging.Handler]:
    """Yield the handlers that get the records of a logger: its own, and those of its parent loggers."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        yield from (each for each in logger.handlers if not isinstance(each, logging.NullHandler))
        logger = logger.parent if logger.propagate else None
