"""``manage.py runlockworker``: the door of the worker."""

from __future__ import annotations

import argparse
import logging
import signal
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser
from django.utils import autoreload
from django.utils.translation import gettext as _

from django_pglock.worker import Worker


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
        parser.add_argument("queues", nargs="*", metavar="QUEUE", help=_("Queues to serve (default: all)."))
        parser.add_argument("--threads", type=_positive, default=4, help=_("Sync tasks at once (default: 4)."))
        parser.add_argument(
            "--grace",
            type=_seconds,
            default=30.0,
            metavar="SECONDS",
            help=_("Time for running tasks to finish after the first signal (default: 30)."),
        )
        parser.add_argument("--database", default="default", help=_("Database alias of the tasks (default: default)."))
        parser.add_argument(
            "--no-listen",
            action="store_false",
            dest="listens",
            help=_("Only poll. For databases that are reached through a pooler in transaction mode."),
        )
        parser.add_argument(
            "--reload",
            action=argparse.BooleanOptionalAction,
            default=None,
            help=_("Start again when code changes, after running tasks have finished (default: if DEBUG)."),
        )

    def handle(self, *args: Any, verbosity: int, reload: bool | None, **options: Any) -> None:
        """Build the worker and run it."""
        show_log(verbosity)
        build = {name: options[name] for name in ("queues", "threads", "grace", "listens")}
        build["using"] = options["database"]
        if settings.DEBUG if reload is None else reload:
            run_reloading(build)
        else:
            run_until_signal(build)


def run_until_signal(build: dict[str, Any]) -> None:
    """Run one worker in the main thread; SIGTERM and SIGINT stop it."""
    worker = Worker(**build)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.stop())
    worker.run()


def run_reloading(build: dict[str, Any]) -> None:
    """Run under Django's autoreloader, which starts the process again when code changes.

    The reloader ends the process from its own thread right after it has said that a file changed, so the worker drains
    while it hears that; and when the reloader itself is stopped by a signal, on the way out.
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
        drain()


def show_log(verbosity: int) -> None:
    """Let the worker's log be seen on the terminal, unless the project has arranged for it."""
    logger = logging.getLogger("django_pglock")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel({0: logging.ERROR, 1: logging.INFO}.get(verbosity, logging.DEBUG))


def _positive(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 1000:
        raise argparse.ArgumentTypeError(_("a number from 1 to 1000 is needed"))
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(_("seconds, zero or more, are needed"))
    return number
