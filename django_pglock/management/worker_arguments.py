"""The arguments of ``runlockworker``."""

from __future__ import annotations

import argparse

from django.core.management.base import CommandParser
from django.utils.translation import gettext as _

from django_pglock.management.arguments import read_by
from django_pglock.management.databases import add_database
from django_pglock.worker.claiming.queues import ORDERS
from django_pglock.worker.options import NUMBERS, up_to
from django_pglock.worker.probes.server import DEFAULT_HOST


def add_worker_arguments(parser: CommandParser) -> None:
    """Add all arguments of the worker."""
    _add_queues(parser)
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
    _add_database(parser)
    _add_processes(parser)
    _add_probes(parser)
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


def _add_queues(parser: CommandParser) -> None:
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


def _add_database(parser: CommandParser) -> None:
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


def _add_processes(parser: CommandParser) -> None:
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


def _add_probes(parser: CommandParser) -> None:
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
