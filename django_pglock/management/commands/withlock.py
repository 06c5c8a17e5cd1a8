"""``manage.py withlock KEY -- COMMAND``: run anything while nobody else does, such as ``migrate`` over all pods."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils.translation import gettext as _

from django_pglock.errors import ConfigurationError, LockError, LockLost, LockNotAvailable
from django_pglock.locks import Handle, lock

#: sysexits.h: somebody else is at it, try again later; and something that must not happen did.
EX_TEMPFAIL, EX_SOFTWARE = 75, 70
#: Seconds between two looks at the lock while the command runs.
LOOK = 1.0


class Command(BaseCommand):
    """Takes a lock, runs a command, gives the lock back."""

    requires_system_checks: list[str] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.command: list[str] = []
        self.help = _(
            "Run a command while holding a lock, for example once over all hosts: "
            "manage.py withlock migrate -- python manage.py migrate --noinput. "
            "Signals are passed on, and the exit code of the command is returned. When the lock is busy: 75, or 0 "
            "with --skip. When the lock is lost: the command is ended and 70 is returned."
        )

    def add_arguments(self, parser: CommandParser) -> None:
        """Say what can be asked for."""
        parser.add_argument(
            "key", metavar="KEY", help=_('Name of the lock. Always a text: 5 is lock("5") in Python, and not lock(5).')
        )
        parser.add_argument(
            "--timeout", type=float, metavar="SECONDS", help=_("Time to wait for the lock (default: without limit).")
        )
        parser.add_argument(
            "--skip", action="store_true", help=_("Do not wait, and be content if somebody else has it.")
        )
        parser.add_argument("--database", help=_("Database alias (default: the setting USING)."))
        parser.usage = "%(prog)s [options] KEY -- COMMAND [ARGUMENT ...]"

    def run_from_argv(self, argv: list[str]) -> None:
        """Keep what follows ``--`` away from the parser, which would look for our options in it."""
        if "--" in argv:
            at = argv.index("--")
            argv, self.command = argv[:at], argv[at + 1 :]
        super().run_from_argv(argv)

    def handle(self, *args: Any, key: str, timeout: float | None, skip: bool, **options: Any) -> None:
        """Take the lock, run, give it back, end with the command's exit code."""
        if not self.command:
            raise CommandError(_("There is no command. Usage: withlock KEY -- COMMAND [ARGUMENT …]"))
        try:
            # Of the scope that the settings say: where sessions are anybody's, a session lock would keep nobody out.
            # Nothing is read in its transaction, if it has one, so no snapshot can be too old.
            with lock(key, timeout=0 if skip else timeout, using=options["database"], stale_ok=True) as handle:
                code = self._run(handle, self.command)
        except LockNotAvailable as busy:
            self.stderr.write(str(busy))
            code = 0 if skip else EX_TEMPFAIL
        except LockLost as lost:
            self.stderr.write(str(lost))
            code = EX_SOFTWARE
        except (ConfigurationError, LockError, ValueError) as error:
            raise CommandError(str(error)) from error
        sys.exit(code)

    def _run(self, handle: Handle, command: list[str]) -> int:
        try:
            child = subprocess.Popen(command)  # noqa: S603 - to run what it is told is what this is for
        except OSError as error:
            raise CommandError(f"{command[0]}: {error.strerror or error}") from error
        pass_signals_on(child)
        code = self._wait(handle, child)
        # A shell's way to say that a signal ended it.
        return code if code >= 0 else 128 - code

    def _wait(self, handle: Handle, child: subprocess.Popen[bytes]) -> int:
        """Wait for the end of the command. Ends it if the lock is lost: it may not be alone any more."""
        while child.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(LOOK)
            try:
                handle.assert_held()
            except LockLost:
                child.terminate()
                child.wait()
                raise
        return int(child.returncode)


def pass_signals_on(child: subprocess.Popen[bytes]) -> None:
    """Let the command decide what a signal means; the lock is held until it has ended."""

    def forward(number: int, frame: Any) -> None:
        # Ctrl-C on a terminal reaches the whole group, so the command has it already.
        if number != signal.SIGINT or os.getpgid(child.pid) != os.getpgrp() or not sys.stdin.isatty():
            child.send_signal(number)

    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), forward)
