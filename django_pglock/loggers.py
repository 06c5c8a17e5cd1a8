"""The loggers of the package. If a handler of the project raises, the call of the logger does not.

``logging`` catches the errors of its own handlers, but not those of filters, of a stream that a task has closed, or of
handlers that do not call ``handleError()``. Such an error would end a thread of the worker, or change the outcome of a
task. So it is printed instead, and the code that logs continues.

A handler may also wait, for a network or for a terminal that does not scroll. The parent of a worker must not wait with
it, because it would beat no more, and neither must the main thread of a child, by which the parent knows whether the
others hang. So their records are written by a thread of its own.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

#: The logger of the worker.
WORKER = "django_pglock.worker"
#: The loggers of the two packages that ``django.tasks`` comes from, which logs the start and the end of each task. With
#: Django's default settings and DEBUG off, the handler drops both. To make them took a third of a worker's time.
OF_DJANGO_TASKS = ("django.tasks", "django_tasks")
#: Seconds between two reports that the log has failed. Each record may fail, and there may be thousands.
BETWEEN_REPORTS = 60.0
#: Records that wait while a handler hangs: further ones are dropped. And seconds for the last ones at the end.
MOST_WAITING, LAST_RECORDS = 10_000, 3.0


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


class _Writer:
    """Writes records in a thread, which lives while there are some: those of one thread, or of all of this process."""

    def __init__(self, only: int | None) -> None:
        self._only = only
        self._records: deque[tuple[logging.Logger, logging.LogRecord]] = deque(maxlen=MOST_WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, logger: logging.Logger, record: logging.LogRecord) -> None:
        if self._only not in (None, threading.get_ident()):
            _handle_now(logger, record)
            return
        with self._lock:
            self._records.append((logger, record))
            # If no thread can be started, the next record tries again.
            with suppress(RuntimeError):
                if self._thread is None:
                    thread = threading.Thread(target=self._write, name="lockworker-log", daemon=True)
                    thread.start()
                    self._thread = thread

    def end(self) -> None:
        if thread := self._thread:
            thread.join(LAST_RECORDS)
            if thread.is_alive():
                # Python would wait for the lock of the handler, without end.
                atexit.unregister(logging.shutdown)

    def _write(self) -> None:
        while True:
            with self._lock:
                if not self._records:
                    self._thread = None
                    return
                each = self._records.popleft()
            _handle_now(*each)


# What writes the records; None: each thread writes its own.
_writer: _Writer | None = None


@contextmanager
def written_by_thread(*, only_mine: bool = False) -> Iterator[None]:
    """Have a thread write the records of this process, or only those of this thread: it waits for no handler."""
    global _writer
    _writer = writer = _Writer(threading.get_ident() if only_mine else None)
    try:
        yield
    finally:
        _writer = None
        writer.end()


def _handle(logger: logging.Logger, record: logging.LogRecord) -> None:
    (_handle_now if _writer is None else _writer.add)(logger, record)


def _handle_now(logger: logging.Logger, record: logging.LogRecord) -> None:
    try:
        type(logger).handle(logger, record)
    except (Exception, SystemExit) as error:
        # In the main thread, SystemExit ends the process: the handler of a signal may have raised it.
        if isinstance(error, SystemExit) and threading.current_thread() is threading.main_thread():
            raise
        report(record)


def report(record: logging.LogRecord) -> None:
    """Print the exception that is handled now, and the record that was not logged, to ``sys.stderr``."""
    if reports.allows():
        # The stream may be closed. Then nothing is left to try.
        with suppress(Exception):
            _printer.handleError(record)
