"""The log records of one attempt, for functions with ``capture_logs``.

One handler at the root logger gets the records. A context variable has the attempt to which a record belongs. So
records of the function's thread or coroutine are captured, and those of calls that copy the context, such as
``sync_to_async``. The handler is added when the first such function runs, so other workers have no cost.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from contextvars import ContextVar

from django_pglock.error_reading import storable

#: The number of last records that are kept, and the largest number of characters of each record and of all together.
MOST_RECORDS, LONGEST_RECORD, MOST_CHARACTERS = 200, 4_000, 32_000

_FORMAT = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
_FORMAT.converter = time.gmtime


class CapturedLogs:
    """The last records of one attempt, of a level and higher."""

    def __init__(self, level: int) -> None:
        self.level = level
        self.count = 0
        self._texts: deque[str] = deque(maxlen=MOST_RECORDS)

    def add(self, record: logging.LogRecord) -> None:
        """Keep a record as text. A record that cannot be formatted is kept with the reason."""
        try:
            # A copy, because a formatter stores the text of the traceback in the record, where other handlers read it.
            text = _FORMAT.format(copy.copy(record))
        except Exception as error:  # noqa: BLE001 - see below
            # The arguments of a record are the project's objects.
            text = f"{record.levelname} {record.name}: the record cannot be formatted ({type(error).__qualname__})"
        self.count += 1
        self._texts.append(text if len(text) <= LONGEST_RECORD else f"{text[:LONGEST_RECORD]}…")

    def text(self) -> str | None:
        """Return the records as text, the newest last, and how many are missing; None if there are none."""
        kept: list[str] = []
        left = MOST_CHARACTERS
        for text in reversed(self._texts):
            left -= len(text) + 1
            if left < 0:
                break
            kept.append(text)
        if self.count > len(kept):
            kept.append(f"… {self.count - len(kept)} earlier records")
        return storable("\n".join(reversed(kept))) or None


_captured: ContextVar[CapturedLogs | None] = ContextVar("django_pglock_captured_logs", default=None)


class _Handler(logging.NullHandler):
    """Keeps the records of attempts. It needs no lock: a record is text in the deque of its attempt.

    It is a NullHandler, so that code that searches for handlers does not count it as one.
    """

    def handle(self, record: logging.LogRecord) -> bool:
        """Keep a record of an attempt. Print other records if Python would print them without this handler."""
        captured = _captured.get()
        if captured is not None and record.levelno >= captured.level:
            captured.add(record)
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and _is_alone(self, record.name):
            last.handle(record)
        return True


_handler = _Handler()


def capture(level: int) -> CapturedLogs:
    """Keep the records that are made in the current context from now on."""
    root = logging.getLogger()
    if _handler not in root.handlers:
        # At the first time, or after the project has configured its logging again.
        root.addHandler(_handler)
    captured = CapturedLogs(level)
    _captured.set(captured)
    return captured


def _is_alone(handler: logging.Handler, name: str) -> bool:
    """Return whether a record of a logger reaches no other handler. Python prints warnings that reach none."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(each is not handler for each in logger.handlers):
            return False
        logger = logger.parent if logger.propagate else None
    return True
