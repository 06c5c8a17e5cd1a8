"""The terminal: its encoding, a closed pipe, tables and JSON, and a question before tasks are changed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.core.serializers.json import DjangoJSONEncoder
from django.utils import timezone
from django.utils.timesince import timesince
from django.utils.translation import gettext as _

#: The columns of a table: their titles, and what they show of a row, which is a dict.
Columns = Collection[tuple[Any, Callable[[dict[str, Any]], Any]]]


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

    def print_rows(self, rows: list[dict[str, Any]], columns: Columns, nothing: str, *, as_json: bool) -> None:
        """Print rows as JSON, with all of their values, or as a table; without rows, this sentence."""
        if as_json:
            self.print_json(rows)
        else:
            self.stdout.write(table(columns, rows) if rows else nothing)

    def print_json(self, value: Any) -> None:
        """Print a value as JSON."""
        self.stdout.write(json.dumps(value, cls=DjangoJSONEncoder, indent=2))


def confirm() -> None:
    """Ask for confirmation. Raises ``CommandError`` for any other answer than yes."""
    try:
        answer = input(_("Continue? [y/N] "))
    except EOFError as error:
        raise CommandError(_("There is no terminal to ask for confirmation; give --yes.")) from error
    if answer.strip().lower() not in ("y", "yes"):
        raise CommandError(_("No task was changed."))


@contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """End the block without an error if the reader of its output has ended, as ``ls | head`` does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends, and would print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def table(columns: Columns, rows: list[dict[str, Any]]) -> str:
    """Return rows as lines with aligned columns, below their titles."""
    lines = [[_cell(show(row)) for _title, show in columns] for row in rows]
    lines.insert(0, [str(title) for title, _show in columns])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _cell(value: Any) -> str:
    return "-" if value in (None, "") else printable(str(value))


def printable(text: str) -> str:
    """Return the text with "?" in place of each character that could control the terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def past(at: Any) -> str:
    """Return how long ago a moment was, by this host's time; empty without a moment."""
    return _("%s ago") % duration_text((timezone.now() - at).total_seconds()) if at else ""


def duration_text(seconds: float) -> str:
    """Return a length of time: in seconds below two minutes, from then on as Django's ``timesince``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    now = timezone.now()
    # In a terminal a no-break space may not be a space.
    return timesince(now - timedelta(seconds=seconds), now).replace("\xa0", " ")
