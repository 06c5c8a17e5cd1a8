"""A worker in the main thread of a process: signals, log, garbage collection, and how the process ends."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from django.apps import apps
from django.conf import settings
from django.core.management.base import CommandError
from django.db import connections
from django.utils import autoreload
from django.utils.translation import gettext as _

from django_pglock import __version__
from django_pglock.errors import ConfigurationError
from django_pglock.loggers import WORKER, get_logger
from django_pglock.management.arguments import WrongArguments

# Its task function: a busy worker searches for unknown ones only every half minute, and people wait for this one.
from django_pglock.store import bulk  # noqa: F401
from django_pglock.tasks import registry
from django_pglock.tasks.schedules import timing_of
from django_pglock.worker import Worker
from django_pglock.worker.logs import keep_off_terminal, silence_unhandled_loggers
from django_pglock.worker.running.task_thread import end_process
from django_pglock.worker.supervising.channel import HANG_UP, LEFT_BEHIND, SupervisorSockets, stop_signals

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

#: Functions and schedules that are named at most.
FEW = 8


def banner(worker: Worker, *, using: str, threads: int) -> str:
    """Return the banner of a worker that claims from the database ``using``: a sentence, and a line for each fact."""
    functions = [task for task in registry.definitions() if not task.is_own]
    schedules = [f"{task.module_path} ({' '.join(timing_of(task)).strip()})" for task in registry.scheduled()]
    facts = {
        "database": _database(using),
        "queues": (", ".join(worker.queues.given) or "all") + _unused(worker, functions),
        "functions": _listed([task.module_path for task in functions])
        or "none; define tasks in a module tasks.py of an app in INSTALLED_APPS",
        "schedules": _listed(schedules) or "none",
        "threads": f"{threads}; coroutines need none",
        "look": _places(),
    }
    lines = [f"  {name:10} {text}" for name, text in facts.items()]
    return "\n".join([f"Worker {worker.identity.name} of django_pglock {__version__} starts.", *lines])


def _unused(worker: Worker, functions: list[TaskFields]) -> str:
    """Return that no function has one of these queues: a name may be a typing error. Empty if no function is known."""
    is_used = any(worker.queues.serves(task.queue_name) for task in functions)
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


logger = get_logger(WORKER)

#: Seconds beyond the grace period within which a process must end, also if a thread hangs in the log of the project.
LAST_RESORT = 60.0
#: The number of new objects after which Python's garbage collector runs.
GARBAGE = 10_000


def run_until_signal(build: dict[str, Any], *, shows_banner: bool = True) -> None:
    """Run one worker in the main thread. SIGTERM, SIGINT and SIGHUP stop the worker."""
    silence_unhandled_loggers()
    worker = Worker(**build)
    if shows_banner:
        log_banner(worker, build)
    stop_at_signals(worker)
    collect_garbage_less_often()
    try:
        have_all_finished = worker.run(ending=partial(end_within, worker.grace + LAST_RESORT))
    except ConfigurationError as error:
        raise CommandError(str(error)) from None
    except RuntimeError:
        leave_running_tasks()
    if not have_all_finished or worker.has_overrun:
        # A supervisor has replaced the process, and needs no error.
        leave_running_tasks(1 if worker.has_overrun and worker.channel is None else 0)
    if worker.left_behind:
        raise CommandError(_("Some tasks did not finish. See the log."), returncode=LEFT_BEHIND)


def own_command_line() -> list[str]:
    """Return the command line of this process, with which a supervisor or the reloader starts other processes.

    Raises ``WrongArguments`` if there is none: Python has read the program from its standard input.
    """
    if sys.argv[0] == "-c":
        # Python has removed the code from the list.
        return [sys.executable, *sys.orig_argv[1:]]
    if sys.argv[0] in ("", "-"):
        raise WrongArguments(
            _(
                "Several processes, --max-… and --reload start this program again, and Python has read it from its "
                "standard input. Run: manage.py runlockworker"
            )
        )
    return list(map(str, autoreload.get_child_arguments()))


def log_banner(worker: Worker, build: dict[str, Any]) -> None:
    """Log the banner of the worker."""
    logger.info("%s", banner(worker, using=build["using"], threads=build["threads"]))


def end_within(seconds: float) -> None:
    """End the process after this number of seconds, whatever its other threads do."""

    def end() -> None:
        os.write(2, b"The worker has not ended in time, because one of its threads hangs. Its process ends.\n")
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def leave_running_tasks(code: int = 0) -> NoReturn:
    """End the process at once, with this exit code or that of the exception, because others will run its tasks.

    Python would wait for threads that the tasks have started, with ``asyncio.to_thread()`` for example, and a task
    would run here and in another worker at the same time.
    """
    error = sys.exc_info()[1] or SystemExit(code)
    try:
        logging.shutdown()
    except BaseException:  # noqa: BLE001 - a handler of the project raises when it is flushed
        with suppress(Exception):
            traceback.print_exc()
    end_process(error)


def collect_garbage_less_often() -> None:
    """Run the garbage collector less often, and exclude the objects that exist by now, because they stay.

    A worker has thousands of short-lived objects at any time. With Python's own threshold of 700 the collector examined
    them every hundred tasks, and at times all objects of Django, too.
    """
    gc.collect()
    gc.freeze()
    often, *others = gc.get_threshold()
    if often:  # zero: the collector is switched off
        gc.set_threshold(max(often, GARBAGE), *others)


class StopAtSignal:
    """The handler of the signals that stop a worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.process = os.getpid()

    def __call__(self, number: int, frame: Any) -> None:
        """Stop the worker. Under a supervisor, and at a SIGHUP, end it, as after its first signal."""
        if os.getpid() != self.process:
            # The signal has reached a forked child before its handlers were reset.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self.worker.channel is None and number != HANG_UP:
            self.worker.stop()
        else:
            self.worker.end()


def stop_at_signals(worker: Worker) -> None:
    """Make signals stop the worker. After the first signal, running tasks finish; the second stops at once.

    Under a supervisor, each signal counts as the first one, because a service manager signals all processes of a
    service, and then the supervisor signals its workers again. So does each SIGHUP, because a shell and the kernel may
    both send one when a terminal is closed.
    """
    for number in stop_signals():
        signal.signal(number, StopAtSignal(worker))


def _reset_signals_after_fork() -> None:
    """Let the signals end a child that a task has forked: multiprocessing's terminate(), for example, is for the child.

    A handler in Python would not do. In a child that another thread than the main thread has forked, Python 3.13.0 does
    not call handlers while Python code runs.
    """
    for number in stop_signals():
        if isinstance(signal.getsignal(number), StopAtSignal):
            signal.signal(number, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_signals_after_fork)


def show_log(verbosity: int, supervisor: SupervisorSockets | None = None) -> None:
    """Write the worker's log to the terminal, unless the project has configured a handler for it.

    Under a supervisor all records of a process carry its name, ``%(processName)s``.
    """
    who = ""
    if supervisor is not None:
        name_records(f"worker-{supervisor.number}")
        who = "%(processName)s[%(process)d] "
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


def name_records(name: str) -> None:
    """Set the ``processName`` of all log records of this process."""
    make = logging.getLogRecordFactory()

    def make_named(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        record.processName = name
        return record

    logging.setLogRecordFactory(make_named)
