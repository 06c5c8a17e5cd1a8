"""``manage.py runlockworker``: the door of the worker."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import subprocess
import sys
from typing import Any, NoReturn

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import autoreload
from django.utils.translation import gettext as _

from django_pglock.conf import get_settings
from django_pglock.errors import ConfigurationError
from django_pglock.management.arguments import read_by
from django_pglock.management.databases import add_database, database_of_tasks, no_backend
from django_pglock.worker import Worker
from django_pglock.worker.claiming.drain import LEFT_BEHIND
from django_pglock.worker.claiming.queues import ORDERS, Queues
from django_pglock.worker.logs import silence_what_nobody_hears
from django_pglock.worker.options import LAST_PORT, NUMBERS, check_options, database_of, our_backends, up_to
from django_pglock.worker.probes.server import DEFAULT_HOST
from django_pglock.worker.running.forked_child import end_here
from django_pglock.worker.supervising.channel import Line, to_supervisor
from django_pglock.worker.supervising.supervisor import Supervisor

#: The exit code with which Django's reloader says that code changed.
CHANGED = 3
#: Options that are arguments of ``Worker``, too.
PASSED_ON = (
    "backend",
    "queues",
    "exclude",
    "order",
    "threads",
    "grace",
    "listens",
    "drain",
    "probe_port",
    "probe_host",
    "heartbeat_file",
)
#: So are those after which a process is replaced.
RECYCLING = ("max_tasks", "max_memory", "max_time")
#: Objects that may come to be before Python looks which of them are garbage.
GARBAGE = 10_000


class Command(BaseCommand):
    """Runs tasks until it is told to stop."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = _(
            "Run tasks. Start as many of these as you like, on as many hosts as you like: they share the work. "
            "The first SIGTERM or Ctrl-C lets running tasks finish, the second gives them back."
        )

    def add_arguments(self, parser: CommandParser) -> None:
        """Say what can be asked for."""
        parser.add_argument(
            "queues",
            nargs="*",
            metavar="QUEUE",
            help=_("Queues to serve (default: all), by name or by how names begin: NAME, PREFIX*, NAME=WEIGHT."),
        )
        parser.add_argument(
            "--exclude",
            action="append",
            default=[],
            metavar="QUEUE",
            help=_("A queue, or PREFIX*, to leave to others."),
        )
        parser.add_argument(
            "--order",
            choices=ORDERS,
            default="weighted",
            help=_(
                "weighted (default): queues come first in proportion to their weights; "
                "strict: always in the order in which they are given."
            ),
        )
        parser.add_argument(
            "--threads", type=read_by(NUMBERS["threads"]), default=4, help=_("Sync tasks at once (default: 4).")
        )
        parser.add_argument(
            "--grace",
            type=read_by(NUMBERS["grace"]),
            default=30.0,
            metavar="SECONDS",
            help=_("Time for running tasks to finish after the first signal (default: 30)."),
        )
        self._add_arguments_of_database(parser)
        self._add_arguments_of_processes(parser)
        self._add_signs_of_life(parser)
        parser.add_argument(
            "--drain",
            action="store_true",
            help=_("End when nothing is left to do. What is scheduled for later, or paused, is left."),
        )
        parser.add_argument(
            "--reload",
            action=argparse.BooleanOptionalAction,
            default=None,
            help=_(
                "Start again when code changes, after running tasks have finished "
                "(default: if DEBUG, and none of the options that end processes is given)."
            ),
        )

    def _add_arguments_of_database(self, parser: CommandParser) -> None:
        add_database(parser)
        parser.add_argument(
            "--backend",
            metavar="NAME",
            help=_("Backend of TASKS to serve, where several share a database (default: all that the database has)."),
        )
        parser.add_argument(
            "--no-listen",
            action="store_false",
            dest="listens",
            help=_("Only poll. For databases that are reached through a pooler in transaction mode."),
        )

    def _add_arguments_of_processes(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--processes",
            type=read_by(up_to(64)),
            default=1,
            metavar="N",
            help=_(
                "Run so many worker processes, each with these options, and start again those that end (default: 1, "
                "which is this process; with one of the --max options it is a child of this one, and replaced)."
            ),
        )
        parser.add_argument(
            "--max-tasks",
            type=read_by(NUMBERS["max_tasks"]),
            metavar="N",
            help=_("Replace a process when it has run so many tasks."),
        )
        parser.add_argument(
            "--max-memory",
            type=read_by(NUMBERS["max_memory"]),
            metavar="MIB",
            help=_("Replace a process that takes more memory than so many MiB. Running tasks get the grace."),
        )
        parser.add_argument(
            "--max-time",
            type=read_by(NUMBERS["max_time"]),
            metavar="SECONDS",
            help=_("Replace a process after this time, or up to a tenth sooner. Running tasks get the grace."),
        )

    def _add_signs_of_life(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--probe-port",
            type=read_by(NUMBERS["probe_port"]),
            metavar="PORT",
            help=_(
                "Answer /livez, /readyz and /metrics over HTTP at this port; "
                "the second of several processes at the next one, and so on."
            ),
        )
        parser.add_argument(
            "--probe-host",
            metavar="ADDRESS",
            help=_("The address for them (default: %s, as probes and scrapers ask from outside).") % DEFAULT_HOST,
        )
        parser.add_argument(
            "--heartbeat-file",
            metavar="PATH",
            help=_("A file to touch at each heartbeat that was written, for probes that look at its age."),
        )

    def handle(self, *args: Any, verbosity: int, reload: bool | None, **options: Any) -> None:
        """Build the worker and run it."""
        line = to_supervisor()
        show_log(verbosity, line)
        build = {name: options[name] for name in PASSED_ON + RECYCLING}
        try:
            build["using"] = chosen_database(options["database"], options["backend"])
            queues = Queues(options["queues"], exclude=options["exclude"], order=options["order"])
            check_options(**build)
        except ConfigurationError as error:
            raise CommandError(str(error)) from None
        refuse_unknown(queues, build["using"], options["backend"])
        refuse_ports(options["probe_port"] or 0, options["processes"])
        if line is not None:
            run_until_signal({**build, "line": line})
            return
        is_supervised = options["processes"] > 1 or any(options[name] for name in RECYCLING)
        if reload and (is_supervised or options["drain"]):
            raise CommandError(
                _("--reload runs one process for long; it cannot be combined with --processes, --max-… or --drain.")
            )
        if is_supervised:
            sys.exit(supervise(options))
        elif reload or (reload is None and settings.DEBUG and not options["drain"]):
            run_reloading(build)
        else:
            run_until_signal(build)


def chosen_database(database: str | None, backend: str | None) -> str:
    """Return the database of the tasks: as it was given, or that of the backend, or that of all backends."""
    return database_of(backend) if backend and database is None else database_of_tasks(database)


def refuse_unknown(queues: Queues, database: str, alias: str | None) -> None:
    """Raise ``CommandError`` for a database or a queue that nobody could mean: such a worker would idle for ever."""
    backends = [each for each in our_backends() if each.database == database and alias in (None, each.alias)]
    if not backends:
        raise no_backend(_("No backend of TASKS has its tasks in database %r.") % database)
    # An empty QUEUES means that every name is one.
    if all(backend.queues for backend in backends):
        configured = {queue for backend in backends for queue in backend.queues}
        known = ", ".join(sorted(configured))
        for pattern in queues.patterns + queues.excluded:
            if not any(map(pattern.covers, configured)):
                raise CommandError(
                    _("QUEUES has no %(name)r; it has %(known)s.") % {"name": pattern.text, "known": known}
                )
        if not any(map(queues.serves, configured)):
            raise CommandError(_("All of QUEUES is excluded: %(known)s.") % {"known": known})


def refuse_ports(first: int, processes: int) -> None:
    """Raise ``CommandError`` where the last processes would have no port: they would be started again for ever."""
    last = first + processes - 1
    if last > LAST_PORT:
        raise CommandError(
            _("The processes would answer probes at the ports %(first)d to %(last)d, and the last one is %(most)d.")
            % {"first": first, "last": last, "most": LAST_PORT}
        )


def run_until_signal(build: dict[str, Any]) -> None:
    """Run one worker in the main thread; SIGTERM and SIGINT stop it."""
    silence_what_nobody_hears()
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
    end_here(sys.exc_info()[1])


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
        worker.stop() if worker.line is None else worker.end()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def supervise(options: dict[str, Any]) -> int:
    """Run our own command line in processes of their own, without a database; return the exit code at last."""
    return Supervisor(
        autoreload.get_child_arguments(),
        processes=options["processes"],
        grace=options["grace"],
        silence=get_settings().HEARTBEAT_LIMIT,
        drain=options["drain"],
    ).run()


def run_reloading(build: dict[str, Any]) -> None:
    """Run a worker that starts again when code changes, after its running tasks have finished."""
    if os.environ.get(autoreload.DJANGO_AUTORELOAD_ENV) == "true":
        run_watched(build)
    else:
        sys.exit(start_again_and_again())


def start_again_and_again() -> int:
    """Start the watched worker, again each time it ends because of a change; return its exit code at last.

    Django's own loop kills the child a quarter of a second after Ctrl-C. Ours passes signals on and waits: the child
    has a session of its own, so that a Ctrl-C on the terminal reaches it once, through us.
    """
    environment = {**os.environ, autoreload.DJANGO_AUTORELOAD_ENV: "true"}
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: Any) -> None:
        if child is not None:
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    while True:
        child = subprocess.Popen(autoreload.get_child_arguments(), env=environment, start_new_session=True)  # noqa: S603
        code = child.wait()
        if code != CHANGED:
            return code


def run_watched(build: dict[str, Any]) -> None:
    """Run one worker under Django's reloader.

    The reloader watches in the main thread and ends the process right after it has said that a file changed, so the
    worker drains while it hears that; and when a signal ends the reloader, on the way out.
    """
    workers: list[Worker] = []

    def work() -> None:
        worker = Worker(**build)
        workers.append(worker)
        worker.run()

    def drain(**kwargs: Any) -> None:
        for worker in workers:
            worker.shutdown()

    autoreload.file_changed.connect(drain, weak=False)
    try:
        autoreload.run_with_reloader(work)
    finally:
        for worker in workers:
            worker.stop()
            stop_at_signals(worker)
        if not all(worker.shutdown() for worker in workers):
            leave_running_tasks()


def show_log(verbosity: int, line: Line | None = None) -> None:
    """Let the worker's log be seen on the terminal, unless the project has arranged for it.

    One of several processes gives its name to all records: ``%(processName)s``.
    """
    who = ""
    if line is not None:
        name_records(f"worker-{line.number}")
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
