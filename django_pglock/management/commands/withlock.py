"""``manage.py withlock KEY -- COMMAND``: run a command under a lock, for example ``migrate`` once over all pods."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext as _

from django_pglock.conf import MOST_SECONDS
from django_pglock.errors import LockLost, LockNotAvailable
from django_pglock.locks.api import lock
from django_pglock.locks.handle import Handle
from django_pglock.management.arguments import WrongArguments, number, plain_refusals, wrong_arguments
from django_pglock.management.terminal import TerminalCommand
from django_pglock.postgres.forking import die_with_parent

#: Exit codes of sysexits.h: the lock is busy, try again later; and an internal error, the lock was lost.
EX_TEMPFAIL, EX_SOFTWARE = 75, 70
#: Seconds between two checks of the lock while the command runs.
CHECK_INTERVAL = 1.0
#: Seconds for which a command may ignore SIGTERM after the lock is lost. Another host may run it meanwhile.
KILLED_AFTER = 10.0


class Command(TerminalCommand):
    """Takes a lock, runs a command, releases the lock."""

    requires_system_checks: list[str] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.command: list[str] = []
        self.help = _(
            "Run a command while holding a lock, so that only one host runs it at a time: "
            "manage.py withlock migrate -- python manage.py migrate --noinput. "
            "Signals are passed on to the command. The exit code is that of the command; 75 if the lock is busy, or 0 "
            "with --skip; 70 if the lock is lost, in which case the command is terminated."
        )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the arguments."""
        parser.add_argument(
            "key", metavar="KEY", help=_('Name of the lock. Always a text: 5 is lock("5") in Python, and not lock(5).')
        )
        parser.add_argument(
            "--timeout",
            type=number(float, 0, MOST_SECONDS),
            metavar="SECONDS",
            help=_("Time to wait for the lock (default: no limit)."),
        )
        parser.add_argument(
            "--skip",
            action="store_true",
            help=_("Do not wait. If the lock is busy, do not run the command and exit with 0."),
        )
        parser.add_argument("--database", help=_("Database alias (default: the setting USING)."))
        parser.usage = "%(prog)s [options] KEY -- COMMAND [ARGUMENT ...]"

    def run_from_argv(self, argv: list[str]) -> None:
        """Remove the arguments after ``--``, in which the parser would look for options of withlock.

        Ctrl-C during the wait for the lock ends this process without a traceback.
        """
        if "--" in argv:
            at = argv.index("--")
            argv, self.command = argv[:at], argv[at + 1 :]
        try:
            super().run_from_argv(argv)
        except KeyboardInterrupt:
            end_by_interrupt()

    @plain_refusals()
    def handle(self, *args: Any, key: str, timeout: float | None, skip: bool, **options: Any) -> None:
        """Take the lock, run the command, release the lock and exit with the exit code of the command."""
        if not self.command:
            raise WrongArguments(_("There is no command. Usage: withlock KEY -- COMMAND [ARGUMENT …]"))
        try:
            # The scope comes from the settings: behind a pooler in transaction mode a session lock excludes no session.
            # stale_ok: nothing is read in the transaction of the lock, so its snapshot cannot be too old.
            seconds = 0 if skip else timeout
            with wrong_arguments(), lock(key, timeout=seconds, using=options["database"], stale_ok=True) as handle:
                code = run(handle, self.command)
        except LockNotAvailable as busy:
            self.stderr.write(str(busy))
            code = 0 if skip else EX_TEMPFAIL
        except LockLost as lost:
            self.stderr.write(str(lost))
            code = EX_SOFTWARE
        sys.exit(code)


def run(handle: Handle, command: Sequence[str]) -> int:
    """Run the command while the lock is held. Return its exit code."""
    try:
        child = start(command)
    except OSError as error:
        raise CommandError(f"{command[0]}: {error.strerror or error}") from error
    pass_signals_on(child)
    code = wait_while_held(handle, child)
    # As in a shell: 128 and the number of the signal that ended the command.
    return code if code >= 0 else 128 - code


def start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the command, with the files that this process has inherited, such as those of ``<(...)`` in a shell.

    The command does not get what this process itself has opened: Python and libpq close their files at exec.
    """
    # Without the function, the command would run on without the lock after a SIGKILL of this process.
    follow = partial(die_with_parent, os.getpid())
    return subprocess.Popen(command, close_fds=False, preexec_fn=follow)  # noqa: S603, PLW1509


def wait_while_held(handle: Handle, child: subprocess.Popen[bytes]) -> int:
    """Wait until the command ends, and return its exit code.

    End it if the lock is lost, because another host may run it now. This, or the release, then raises ``LockLost``.
    """
    while child.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            child.wait(CHECK_INTERVAL)
        try:
            handle.assert_held()
        except LockLost:
            end(child)
            if handle.scope != "session":
                raise
            # The release of a session lock raises LockLost itself. It would log a second message if this raised, too.
            return EX_SOFTWARE
    return int(child.returncode)


def end(child: subprocess.Popen[bytes]) -> None:
    """Terminate the command, and kill it if it ignores that."""
    child.terminate()
    try:
        child.wait(KILLED_AFTER)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def end_by_interrupt() -> None:
    """End this process by SIGINT. From an exit code, a shell would not know that it has to end its script, too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)


def pass_signals_on(child: subprocess.Popen[bytes]) -> None:
    """Pass signals on to the command. The lock is held until the command has ended."""

    def forward(number: int, frame: Any) -> None:
        if number != signal.SIGINT or not is_sent_ctrl_c(child):
            child.send_signal(number)

    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), forward)


def is_sent_ctrl_c(child: subprocess.Popen[bytes]) -> bool:
    """Return whether the terminal sends Ctrl-C to the command as well: to each process of its foreground group."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp() == os.getpgid(child.pid)
    except OSError:
        # There is no terminal, or the command has ended.
        return False
