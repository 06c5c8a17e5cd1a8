"""The parts of ``runlockworker`` that are about its process: banner, log, command line."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from django.apps import apps
from django.conf import settings
from django.db import connections
from django.utils import autoreload
from django.utils.translation import gettext as _

from django_pglock import __version__
from django_pglock.loggers import OF_DJANGO_TASKS, WORKER, get_logger
from django_pglock.management.arguments import WrongArguments
from django_pglock.tasks import registry
from django_pglock.tasks.schedules import timing_of
from django_pglock.worker.queues import Queues

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

logger = get_logger(WORKER)

#: Functions and schedules that are named at most.
FEW = 8


def banner(queues: Queues, databases: Sequence[str], *, processes: int, threads: int) -> str:
    """Return the banner of a worker: a sentence, and a line for each fact."""
    functions = [task for task in registry.definitions() if not task.is_own]
    schedules = [f"{task.module_path} ({' '.join(timing_of(task)).strip()})" for task in registry.scheduled()]
    facts = {
        "database": "; ".join(map(_database, databases)),
        "queues": (", ".join(queues.given) or "all") + _unused(queues, functions),
        "functions": _listed([task.module_path for task in functions])
        or "none; define tasks in a module tasks.py of an app in INSTALLED_APPS",
        "schedules": _listed(schedules) or "none",
        "processes": f"{processes}, each with {threads} threads; coroutines need none",
        "look": _places(),
    }
    lines = [f"  {name:10} {text}" for name, text in facts.items()]
    return "\n".join([f"Worker {os.getpid()} of django_pglock {__version__} starts.", *lines])


def _unused(queues: Queues, functions: list[TaskFields]) -> str:
    """Return that no function has one of these queues: a name may be a typing error. Empty if no function is known."""
    is_used = any(queues.serves(task.queue_name) for task in functions)
    return "; no function is enqueued there, unless by using(queue_name=...)" if functions and not is_used else ""


def _database(using: str) -> str:
    """Return the alias, and the address of the database in the settings without user and password."""
    settings = connections[using].settings_dict
    host, port = settings["HOST"], settings["PORT"]
    where = f" at {host}{':' if port else ''}{port}" if host else ""
    return f"{using}: {settings['NAME'] or 'named by the environment'}{where}"


def _listed(names: list[str]) -> str:
    """Return the number of names and the names, or the first of them; an empty string if there are none."""
    if not names:
        return ""
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return f"{len(names)}: {', '.join(names[:FEW])}{more}"


def _places() -> str:
    admin = ", the pages 'Background tasks and locks' of the admin" if apps.is_installed("django.contrib.admin") else ""
    return f"manage.py locktasks status{admin}; Ctrl-C ends the worker after its running tasks"


def own_command_line() -> list[str]:
    """Return the command line of this process, with which new interpreters are started.

    Raises ``WrongArguments`` if there is none: Python has read the program from its standard input.
    """
    if sys.argv[0] == "-c":
        # Python has removed the code from the list.
        return [sys.executable, *sys.orig_argv[1:]]
    if sys.argv[0] in ("", "-"):
        raise WrongArguments(
            _(
                "This worker has to start its program again, and Python has read it from its standard input. Run: "
                "manage.py runlockworker"
            )
        )
    return list(map(str, autoreload.get_child_arguments()))


def show_log(verbosity: int, *, is_one_of_several: bool) -> None:
    """Write the worker's log to the terminal, unless the project has configured a handler for it.

    All records carry the name of their process, ``%(processName)s``: ``worker`` or, of a child, ``worker-1``.
    """
    multiprocessing.current_process().name = "worker"
    who = "%(processName)s[%(process)d] " if is_one_of_several else ""
    package = logging.getLogger("django_pglock")
    if not package.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {who}%(message)s"))
        package.addHandler(handler)
        package.setLevel({0: logging.ERROR, 1: logging.INFO}.get(verbosity, logging.DEBUG))
        if settings.DEBUG and verbosity:
            # Instead of the lines of django.tasks: in development people want to see that a task has run.
            logger.setLevel(logging.DEBUG)
        keep_off_terminal()


def silence_unhandled_loggers() -> list[str]:
    """Set the level of django.tasks' loggers to WARNING if no handler takes lower records. Return the loggers' names.

    Only for a process that belongs to the worker. A logger with a level is not changed. No logger is changed if other
    code has replaced the method that calls the handlers, as some error trackers do to collect log records.
    """
    if logging.Logger.callHandlers.__module__ != "logging":
        return []
    undecided = [name for name in OF_DJANGO_TASKS if not logging.getLogger(name).level]
    silenced = [name for name in undecided if not is_handled(name, logging.INFO)]
    for name in silenced:
        logging.getLogger(name).setLevel(logging.WARNING)
    return silenced


def keep_off_terminal() -> None:
    """Keep the records of django.tasks off the terminal, because the worker's own log has the same information.

    Other handlers, such as the one that mails errors to the admins, still get the records.
    """
    for name in OF_DJANGO_TASKS:
        for handler in _handlers_of(name):
            if isinstance(handler, logging.StreamHandler):
                handler.addFilter(_is_of_others)
        if not logging.getLogger(name).hasHandlers():
            # Without a handler Python would write warnings and errors to the terminal.
            logging.getLogger(name).addHandler(logging.NullHandler())


def _is_of_others(record: logging.LogRecord) -> bool:
    return record.name not in OF_DJANGO_TASKS


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
