"""A worker in the main thread of a process: signals, log, garbage collection, and how the process ends."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from typing import Any, NoReturn

from django.core.management.base import CommandError
from django.utils.translation import gettext as _

from django_pglock.errors import ConfigurationError
from django_pglock.worker import Worker
from django_pglock.worker.logs import silence_unhandled_loggers
from django_pglock.worker.running.forked_child import end_process
from django_pglock.worker.supervising.channel import LEFT_BEHIND, SupervisorChannel

#: Objects that may come to be before Python looks which of them are garbage.
GARBAGE = 10_000


def run_until_signal(build: dict[str, Any]) -> None:
    """Run one worker in the main thread; SIGTERM and SIGINT stop it."""
    silence_unhandled_loggers()
    worker = Worker(**build)
    stop_at_signals(worker)
    look_less_for_garbage()
    try:
        have_all_finished = worker.run()
    except ConfigurationError as error:
        raise CommandError(str(error)) from None
    if not have_all_finished:
        leave_running_tasks()
    if worker.left_behind:
        raise CommandError(_("Not all is done: see the log."), returncode=LEFT_BEHIND)


def leave_running_tasks() -> NoReturn:
    """End the process at once, with the exit code that it would have: its tasks are about to run elsewhere.

    Python would wait for threads that they have started, ``asyncio.to_thread()`` for example, and both would run.
    """
    logging.shutdown()
    end_process(sys.exc_info()[1])


def look_less_for_garbage() -> None:
    """Have Python look for cycles of garbage less often, and never among what is loaded by now, for that stays.

    A worker has thousands of small objects on their way at any time. With Python's own threshold of 700 it looked
    through them every hundred tasks, and at times through all of Django.
    """
    gc.collect()
    gc.freeze()
    often, *rest = gc.get_threshold()
    if often:  # zero: somebody has switched it off
        gc.set_threshold(max(often, GARBAGE), *rest)


def stop_at_signals(worker: Worker) -> None:
    """Let SIGTERM and SIGINT stop the worker: the first in order, a second at once.

    Under a supervisor all count as the first: service managers tell every process of a service, and so does it.
    """
    process = os.getpid()

    def stop(number: int, frame: Any) -> None:
        if os.getpid() != process:
            # A child that a task has forked is meant by itself: multiprocessing's terminate(), for example.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        worker.stop() if worker.channel is None else worker.end()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def show_log(verbosity: int, channel: SupervisorChannel | None = None) -> None:
    """Let the worker's log be seen on the terminal, unless the project has arranged for it.

    One of several processes gives its name to all records: ``%(processName)s``.
    """
    who = ""
    if channel is not None:
        name_records(f"worker-{channel.number}")
        who = "%(processName)s[%(process)d] "
    logger = logging.getLogger("django_pglock")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {who}%(message)s"))
        logger.addHandler(handler)
        logger.setLevel({0: logging.ERROR, 1: logging.INFO}.get(verbosity, logging.DEBUG))


def name_records(name: str) -> None:
    """Have all log records of this process say that it is called ``name``."""
    make = logging.getLogRecordFactory()

    def make_named(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        record.processName = name
        return record

    logging.setLogRecordFactory(make_named)
