"""A log handler of a project that raises for each record, after it has printed the record."""

from __future__ import annotations

import logging
import sys
import threading


class Raising(logging.Handler):
    """Raises SystemExit in threads, and ValueError in the main thread, where SystemExit ends the process."""

    has_begun = False

    def emit(self, record):
        self.has_begun = True
        # A formatter cannot print each exception.
        sys.stdout.write(f"{record.processName}[{record.process}] {record.getMessage()}\n")
        sys.stdout.flush()
        if threading.current_thread() is threading.main_thread():
            raise ValueError("no log here")
        if record.levelno >= logging.ERROR or record.threadName == "lockworker-loop":
            raise ValueError("no log in this thread")
        sys.exit("no log in any thread")

    def flush(self):
        # Not before, because Django flushes all handlers when it configures others.
        if self.has_begun:
            raise LookupError("nothing to flush")
