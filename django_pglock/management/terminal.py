"""The terminal: its encoding, a closed pipe, tables, a question before tasks are changed, and the name of the user."""

from __future__ import annotations

import contextlib
import getpass
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone
from django.utils.timesince import timesince
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


def aligned(head: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the head and the lines with aligned columns."""
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
    for line in (head, *lines):
        yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()


def printable(text: str) -> str:
    """Return the text with "?" in place of each character that could control the terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def ago(since: Any, now: Any = None) -> str:
    """Return the time from a moment to ``now`` (default: this host's time) as text, "-" without a moment."""
    return duration_text(((now or timezone.now()) - since).total_seconds()) if since else "-"


def duration_text(seconds: float) -> str:
    """Return a length of time: in seconds below two minutes, from then on as Django's ``timesince``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    now = timezone.now()
    # In a terminal a no-break space may not be a space.
    return timesince(now - timedelta(seconds=seconds), now).replace("\xa0", " ")
