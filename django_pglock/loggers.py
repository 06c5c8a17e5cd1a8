"""The loggers of the package. If a handler of the project raises, the call of the logger does not.

``logging`` catches the errors of its own handlers, but not those of filters, of a stream that a task has closed, or of
handlers that do not call ``handleError()``. Such an error would end a thread of the worker, or change the outcome of a
task. So it is printed instead, and the code that logs continues.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from functools import partial

#: The logger of the worker.
WORKER = "django_pglock.worker"
#: Seconds between two reports that the log has failed. Each record may fail, and there may be thousands.
BETWEEN_REPORTS = 60.0


class RateOfRecords:
    """Allows a record about something that repeats, and the next one after ``seconds``. Threads may share it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next_at = 0.0

    def allows(self) -> bool:
        """Return whether a record may be written now. Two threads may get True at the same moment."""
        now = time.monotonic()
        if now < self._next_at:
            return False
        self._next_at = now + self._seconds
        return True


#: For reports that the log has failed, in the whole process.
reports = RateOfRecords(BETWEEN_REPORTS)
# Only for its method that prints an error.
_printer = logging.Handler()


def get_logger(name: str) -> logging.Logger:
    """Return a logger of the package, as ``logging.getLogger()`` does, whose calls do not raise what handlers raise."""
    logger = logging.getLogger(name)
    # In the object, and not in a class: a project may set the class of all loggers, and trackers replace its methods.
    setattr(logger, "handle", partial(_handle, logger))  # noqa: B010 - mypy refuses to assign to a method
    return logger


def _handle(logger: logging.Logger, record: logging.LogRecord) -> None:
    try:
        type(logger).handle(logger, record)
    except Exception:  # noqa: BLE001 - the code of the project
        report(record)


def report(record: logging.LogRecord) -> None:
    """Print the exception that is handled now, and the record that was not logged, to ``sys.stderr``."""
    if reports.allows():
        # The stream may be closed. Then nothing is left to try.
        with suppress(Exception):
            _printer.handleError(record)
