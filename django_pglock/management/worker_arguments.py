"""The arguments of ``runlockworker``."""

from __future__ import annotations

import argparse

from django.core.management.base import CommandParser
from django.utils.translation import gettext as _

from django_pglock.management.arguments import number
from django_pglock.worker.options import DEFAULT_HOST, NUMBERS


def add_worker_arguments(parser: CommandParser) -> None:
    """Add all arguments of the worker."""
    _add_queues(parser)
    parser.add_argument(
        "--threads",
        type=number(*NUMBERS["threads"]),
        default=4,
        help=_("Number of sync tasks that run at once (default: 4)."),
    )
    parser.add_argument(
        "--grace",
        type=number(*NUMBERS["grace"]),
        default=30.0,
        metavar="SECONDS",
        help=_("Time that running tasks have to finish after the first signal (default: 30)."),
    )
    _add_database(parser)
    _add_processes(parser)
    _add_probes(parser)
    parser.add_argument(
        "--drain",
        action="store_true",
        help=_("Exit when no task is left to run. Tasks scheduled for later and tasks in paused queues are not run."),
    )
    parser.add_argument(
        "--reload",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=_(
            "Restart when code changes, after running tasks have finished (default: if DEBUG is on, without --drain)."
        ),
    )


def _add_queues(parser: CommandParser) -> None:
    parser.add_argument(
        "queues",
        nargs="*",
        metavar="QUEUE",
        help=_(
            "Queues to serve (default: all): NAME, or PREFIX* for all names with this prefix. They are searched in the "
            "given order; with NAME=WEIGHT, the weight says how often a queue is searched first."
        ),
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="QUEUE",
        help=_("A queue, or PREFIX*, that is not served. Can be repeated."),
    )


def _add_database(parser: CommandParser) -> None:
    parser.add_argument(
        "--database",
        action="append",
        default=[],
        metavar="ALIAS",
        help=_(
            "Database alias of the tasks (default: the one that the backends in TASKS use). Can be repeated: each "
            "database has --processes of its own."
        ),
    )
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help=_("Name in TASKS of the backend to serve, if several share a database (default: all of that database)."),
    )


def _add_processes(parser: CommandParser) -> None:
    parser.add_argument(
        "--processes",
        type=number(*NUMBERS["processes"]),
        default=1,
        metavar="N",
        help=_(
            "Number of processes that run tasks, each with these options. This process runs none: it watches them, and "
            "replaces one that ends (default: 1)."
        ),
    )
    parser.add_argument(
        "--max-tasks",
        type=number(*NUMBERS["max_tasks"]),
        metavar="N",
        help=_("Replace a process after it has run N tasks."),
    )
    parser.add_argument(
        "--max-memory",
        type=number(*NUMBERS["max_memory"]),
        metavar="MIB",
        help=_("Replace a process that uses more memory than this. Running tasks have the --grace to finish."),
    )


def _add_probes(parser: CommandParser) -> None:
    parser.add_argument(
        "--probe-port",
        metavar="PORT",
        help=_(
            "Serve /livez, /readyz and /metrics over HTTP on this port, or at ADDRESS:PORT (default address: %s, "
            "because probes and scrapers are on other hosts)."
        )
        % DEFAULT_HOST,
    )
