"""The terminal: its encoding, a question before tasks are changed, and the name of the user, stored with a change."""

from __future__ import annotations

import contextlib
import getpass
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils.translation import gettext as _


class TerminalCommand(BaseCommand):
    """A command whose output may have characters that the encoding of the terminal does not have.

    These are printed as escapes, as Python prints them to ``stderr``. Queues may have any name, and in French the help
    would end in a traceback.
    """

    def run_from_argv(self, argv: Any) -> None:
        """Run the command."""
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            # It raises if this process has replaced a file behind the stream by a pipe.
            with contextlib.suppress(OSError):
                sys.stdout.reconfigure(errors="backslashreplace")
        super().run_from_argv(argv)


def confirm() -> None:
    """Ask for confirmation. Raises ``CommandError`` for any other answer than yes."""
    try:
        answer = input(_("Continue? [y/N] "))
    except EOFError as error:
        raise CommandError(_("There is no terminal to ask for confirmation; give --yes.")) from error
    if answer.strip().lower() not in ("y", "yes"):
        raise CommandError(_("No task was changed."))


def name_of_user() -> str:
    """Return the name of the system user. A user without a name, as in some containers, is called locktasks."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "locktasks"


@contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """End the block without an error if the reader of its output has ended, as ``ls | head`` does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends, and would print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
