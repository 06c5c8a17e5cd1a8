"""The loggers of the package. If a handler of the project raises, the call of the logger does not.

``logging`` catches the errors of its own handlers, but not those of filters, of formatters that fail with SystemExit,
of a stream that a task has closed, or of handlers that do not call ``handleError()``. Such an error would end a thread
of the worker, or change the outcome of a task. So it is printed instead, as ``Handler.handleError()`` does, and the
code that logs continues.

Exceptions that other code sends into a thread are not held back, because they are not about the log: ``TaskTimeout``,
and what signal handlers raise in the main thread. There a SystemExit of a handler ends the process, too. In another
thread it would end only this thread, and the process would continue without it.
"""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from functools import partial
from typing import Any

from django_pglock.error_reading import class_path_of, is_a, is_main_thread, is_printable, is_sent, traceback_of

#: The logger of the worker. No code of the project calls it, so all exceptions here come from the log.
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
    setattr(logger, "makeRecord", partial(_make_record, logger))  # noqa: B010 - mypy refuses to assign to a method
    setattr(logger, "handle", partial(_handle, logger))  # noqa: B010
    return logger


def _make_record(
    logger: logging.Logger, name: str, level: int, file: str, line: int, text: Any, args: Any, error: Any, *more: Any
) -> logging.LogRecord:
    """Make a record. If the project's factory of records fails, make one as Python does."""
    try:
        return type(logger).makeRecord(logger, name, level, file, line, text, args, error, *more)
    except BaseException as failed:
        # The arguments may be the reason.
        record = logging.LogRecord(name, level, file, line, text, None, error, *more[:1])
        if _is_sent(failed, name):
            raise
        report(record)
        return record


def _handle(logger: logging.Logger, record: logging.LogRecord) -> None:
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and not (record.exc_text or is_printable(error)):
        # Formatters use this text, and could make none.
        record.exc_text = traceback_of(error).rstrip("\n")
    try:
        type(logger).handle(logger, record)
    except BaseException as failed:
        if _is_sent(failed, logger.name):
            raise
        report(record)


def _is_sent(error: BaseException, name: str) -> bool:
    """Return whether other code may have sent this exception into the thread during a call of the logger ``name``."""
    if is_sent(error) or is_a(error, Exception):
        return is_sent(error)
    if is_main_thread():
        return True
    # Others, such as gevent.Timeout, are sent into the project's own threads.
    return name != WORKER and not is_a(error, (SystemExit, KeyboardInterrupt))


def report(record: logging.LogRecord) -> None:
    """Print the exception that is handled now, and the record that was not logged, to ``sys.stderr``."""
    if not reports.allows():
        return
    error = sys.exc_info()[1]
    try:
        _printer.handleError(record)
    except BaseException as failed:
        if _is_sent(failed, record.name):
            raise
        if error is not None and logging.raiseExceptions:
            # The exception cannot be printed, or the stream is closed. Then nothing is left to try.
            with suppress(Exception):
                sys.stderr.write(f"The log has raised {class_path_of(error)}. The record was: {record.msg!r}\n")
