"""``manage.py runlockworker``: check the arguments and run the parent of a worker."""

from __future__ import annotations

import os
import signal
import sys
from argparse import BooleanOptionalAction
from functools import partial
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext as _

from django_pglock.errors import ConfigurationError
from django_pglock.loggers import WORKER, get_logger
from django_pglock.management.arguments import WrongArguments, number, wrong_arguments
from django_pglock.management.terminal import TerminalCommand
from django_pglock.management.worker_process import banner, own_command_line, show_log, silence_unhandled_loggers
from django_pglock.tasks.backends import database_of_tasks, our_backends
from django_pglock.worker import Worker
from django_pglock.worker.child.child import LEFT_BEHIND, run_child
from django_pglock.worker.options import DEFAULT_HOST, NUMBERS
from django_pglock.worker.parent.starter import channel_of_spawned, run_to_end
from django_pglock.worker.queues import Queues

logger = get_logger(WORKER)

#: Options that are passed to ``Worker`` by the same names.
PASSED_ON = (
    *("backend", "queues", "exclude", "processes", "threads", "grace", "drain", "max_tasks", "max_memory"),
    "probe_port",
)


class Command(TerminalCommand):
    """Runs tasks until a signal stops the process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.help = _(
            "Run a worker. Any number of workers, on any number of hosts, share the tasks. After the first SIGTERM or "
            "Ctrl-C the worker lets running tasks finish; after the second it gives them back to other workers."
        )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the arguments."""

        def add(name: str, text: str, **options: Any) -> None:
            if (limits := NUMBERS.get(name[2:].replace("-", "_"))) is not None:
                options["type"] = number(*limits)
            parser.add_argument(name, help=text, **options)

        queues = _(
            "Queues to serve (default: all): NAME, or PREFIX* for all names with this prefix. They are searched in the "
            "given order; with NAME=WEIGHT, the weight says how often a queue is searched first."
        )
        add("queues", queues, nargs="*", metavar="QUEUE")
        excluded = _("A queue, or PREFIX*, that is not served. Can be repeated.")
        add("--exclude", excluded, action="append", default=[], metavar="QUEUE")
        add("--threads", _("Number of sync tasks that run at once (default: 4)."), default=4)
        grace = _("Time that running tasks have to finish after the first signal (default: 30).")
        add("--grace", grace, default=30.0, metavar="SECONDS")
        databases = _(
            "Database alias of the tasks (default: the one that the backends in TASKS use). Can be repeated: each "
            "database has --processes of its own."
        )
        add("--database", databases, action="append", default=[], metavar="ALIAS")
        backend = _(
            "Name in TASKS of the backend to serve, if several share a database (default: all of that database)."
        )
        add("--backend", backend, metavar="NAME")
        processes = _(
            "Number of processes that run tasks, each with these options. This process runs none: it watches them, and "
            "replaces one that ends (default: 1)."
        )
        add("--processes", processes, default=1, metavar="N")
        add("--max-tasks", _("Replace a process after it has run N tasks."), metavar="N")
        memory = _("Replace a process that uses more memory than this. Running tasks have the --grace to finish.")
        add("--max-memory", memory, metavar="MIB")
        probes = _(
            "Serve /livez, /readyz and /metrics over HTTP on this port, or at ADDRESS:PORT (default address: %s, "
            "because probes and scrapers are on other hosts)."
        )
        add("--probe-port", probes % DEFAULT_HOST, metavar="PORT")
        drain = _("Exit when no task is left to run. Tasks scheduled for later and tasks in paused queues are not run.")
        add("--drain", drain, action="store_true")
        reload = _(
            "Restart when code changes, after running tasks have finished (default: if DEBUG is on, without --drain)."
        )
        add("--reload", reload, action=BooleanOptionalAction, default=None)

    def run_from_argv(self, argv: list[str]) -> None:
        """Say in one sentence that Ctrl-C has come before the worker could run, for example during the checks."""
        try:
            super().run_from_argv(argv)
        except KeyboardInterrupt:
            self.stderr.write(_("Interrupted. The worker had not started."))
            sys.exit(128 + signal.SIGINT)

    def handle(self, *args: Any, verbosity: int, reload: bool | None, **options: Any) -> None:
        """Check the arguments, and run a parent or, in a new interpreter of one, a child."""
        with wrong_arguments():
            worker = Worker(
                using=options["database"] or database_of_tasks(options["backend"], option="--database"),
                command=own_command_line,
                reloads=bool(reload or (reload is None and settings.DEBUG and not options["drain"])),
                **{name: options[name] for name in PASSED_ON},
            )
        databases, processes = worker.databases, worker.processes
        for database in databases:
            refuse_unknown(worker.queues, database, options["backend"])
        if reload and options["drain"]:
            raise WrongArguments(_("--reload runs without an end, so it cannot be combined with --drain."))
        show_log(verbosity, is_one_of_several=processes * len(databases) > 1)
        silence_unhandled_loggers()
        if (channel := channel_of_spawned()) is not None:
            run_to_end(partial(run_child, channel))
        logger.info("%s", banner(worker.queues, databases, processes=processes, threads=options["threads"]))
        try:
            has_ended_in_order = worker.run()
        except ConfigurationError as error:
            raise CommandError(str(error)) from None
        if worker.code_has_changed:
            os.execv(sys.executable, own_command_line())  # noqa: S606
        if worker.left_behind:
            raise CommandError(_("Some tasks did not finish. See the log."), returncode=LEFT_BEHIND)
        if not has_ended_in_order:
            sys.exit(1)


def refuse_unknown(queues: Queues, database: str, alias: str | None) -> None:
    """Raise ``WrongArguments`` for a queue that can have no tasks: the worker would idle forever."""
    backends = [each for each in our_backends(database) if alias in (None, each.alias)]
    # With an empty QUEUES every name is allowed.
    if all(backend.queues for backend in backends):
        configured = {queue for backend in backends for queue in backend.queues}
        known = ", ".join(sorted(configured))
        for pattern in queues.patterns + queues.excluded:
            if not any(map(pattern.covers, configured)):
                raise WrongArguments(
                    _("QUEUES has no %(name)r; it has %(known)s.") % {"name": pattern.text, "known": known}
                )
        if not any(map(queues.serves, configured)):
            raise WrongArguments(_("All queues of QUEUES are excluded: %(known)s.") % {"known": known})
