"""A log handler of a project that raises for each record, after it has printed the record."""

from __future__ import annotations

import logging
import sys


class Raising(logging.Handler):
    has_begun = False

    def emit(self, record):
        self.has_begun = True
        # A formatter cannot print each exception.
        sys.stdout.write(f"{record.processName}[{record.process}] {record.getMessage()}\n")
        sys.stdout.flush()
        raise ValueError("no log here")

    def flush(self):
        # Not before, because Django flushes all handlers when it configures others.
        if self.has_begun:
            raise LookupError("nothing to flush")
