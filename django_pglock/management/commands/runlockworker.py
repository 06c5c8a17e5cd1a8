"""``manage.py runlockworker``: check the arguments and run a worker, a reloading worker, or a supervisor."""

from __future__ import annotations

import sys
from typing import Any

from django.conf import settings
from django.core.management.base import CommandParser
from django.utils.translation import gettext as _

from django_pglock.conf import get_settings
from django_pglock.errors import ConfigurationError
from django_pglock.management.arguments import WrongArguments
from django_pglock.management.terminal import TerminalCommand
from django_pglock.management.worker_arguments import add_worker_arguments
from django_pglock.management.worker_process import own_command_line, run_until_signal, show_log
from django_pglock.management.worker_reload import run_reloading
from django_pglock.tasks.backends import our_backends
from django_pglock.worker.claiming.queues import Queues
from django_pglock.worker.options import LAST_PORT, check_options, database_to_serve, probe_address
from django_pglock.worker.supervising.channel import to_supervisor
from django_pglock.worker.supervising.shared_heartbeat import SharedHeartbeat
from django_pglock.worker.supervising.supervisor import Supervisor

#: Options that are passed to ``Worker`` by the same names.
PASSED_ON = (
    "backend",
    "queues",
    "exclude",
    "threads",
    "grace",
    "drain",
    "probe_port",
)
#: Options of ``Worker``, too. Each makes a supervisor replace the process.
RECYCLING = ("max_tasks", "max_memory")


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
        add_worker_arguments(parser)

    def handle(self, *args: Any, verbosity: int, reload: bool | None, **options: Any) -> None:
        """Build the worker and run it."""
        supervisor = to_supervisor()
        show_log(verbosity, supervisor)
        build = {name: options[name] for name in PASSED_ON + RECYCLING}
        try:
            databases = chosen_databases(options["database"], options["backend"])
            queues = Queues(options["queues"], exclude=options["exclude"])
            for database in databases:
                check_options(using=database, **build)
        except ConfigurationError as error:
            raise WrongArguments(str(error)) from None
        for database in databases:
            refuse_unknown(queues, database, options["backend"])
        processes = options["processes"] * len(databases)
        refuse_ports(options["probe_port"], processes)
        if supervisor is not None:
            database = databases[(supervisor.number - 1) % len(databases)]
            # The first process of each database shows the banner.
            is_first = supervisor.number <= len(databases)
            run_until_signal({**build, "using": database, "supervisor": supervisor}, shows_banner=is_first)
            return
        build["using"] = databases[0]
        is_supervised = processes > 1 or any(options[name] for name in RECYCLING)
        if reload and (is_supervised or options["drain"]):
            raise WrongArguments(
                _(
                    "--reload runs one endless process, so it cannot be combined with --processes, several --database, "
                    "--max-… or --drain."
                )
            )
        if is_supervised:
            sys.exit(supervise(databases, options))
        elif reload or (reload is None and settings.DEBUG and not options["drain"]):
            run_reloading(build)
        else:
            run_until_signal(build)


def chosen_databases(databases: list[str] | str | None, backend: str | None) -> list[str]:
    """Return the given databases without duplicates; without any, that of the given backend, or of all backends."""
    if databases:
        # call_command() may be given a single alias.
        return list(dict.fromkeys([databases] if isinstance(databases, str) else databases))
    return [database_to_serve(backend, option="--database")]


def refuse_unknown(queues: Queues, database: str, alias: str | None) -> None:
    """Raise ``WrongArguments`` for a queue that can have no tasks: the worker would idle forever."""
    backends = [each for each in our_backends() if each.database == database and alias in (None, each.alias)]
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


def refuse_ports(given: str | None, processes: int) -> None:
    """Raise ``WrongArguments`` if there are too few ports: a process without one would be restarted forever."""
    first = 0 if given is None else probe_address(given)[1]
    last = first + processes - 1
    if last > LAST_PORT:
        raise WrongArguments(
            _("The processes would need the ports %(first)d to %(last)d for probes, but the highest port is %(most)d.")
            % {"first": first, "last": last, "most": LAST_PORT}
        )


def supervise(databases: list[str], options: dict[str, Any]) -> int:
    """Run this command line in a number of child processes for each database. Return the supervisor's exit code.

    Several processes of one database share a heartbeat. With one process the supervisor has no database session.
    """
    is_shared = options["processes"] > 1
    return Supervisor(
        own_command_line(),
        processes=options["processes"] * len(databases),
        grace=options["grace"],
        silence=get_settings().HEARTBEAT_LIMIT,
        drain=options["drain"],
        heartbeats=[SharedHeartbeat(each) for each in databases if is_shared],
    ).run()
