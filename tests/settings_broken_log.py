"""A handler of the log that blocks, or raises an error, at the first record that a parent logs after its start."""

import logging
import os
import sys
import threading

from tests.settings import *  # noqa: F403


class Broken(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr, flush=True)
        if record.processName == "worker" and "is ready" in record.getMessage():
            if os.environ["BROKEN_LOG"] == "block":
                threading.Event().wait()
            raise RuntimeError("the log of the project")


LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"broken": {"()": Broken}},
    "loggers": {"django_pglock": {"handlers": ["broken"], "level": "INFO"}},
}
