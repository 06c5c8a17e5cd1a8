"""The arguments of commands: their conversion, the database that a command works on, and its refusals as messages."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.core.management.base import CommandError
from django.db import DatabaseError, InterfaceError, OperationalError
from django.utils.translation import gettext as _

from django_pglock.errors import ConfigurationError, StepError


class WrongArguments(CommandError):
    """Arguments that the parser accepts and the command does not. The exit code is 2, as for errors of the parser."""

    def __init__(self, text: str) -> None:
        super().__init__(text, returncode=2)


def number(kind: type[float], lowest: float, highest: float) -> Callable[[str], float]:
    """Return a ``type`` for argparse that reads a number, an ``int`` or a ``float``, within these limits."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not lowest <= value <= highest:  # nor is NaN
            known = {"text": text, "lowest": lowest, "highest": highest}
            raise argparse.ArgumentTypeError(_("%(text)r is not a number from %(lowest)s to %(highest)s") % known)
        return value

    return parse


def json_value(text: str) -> Any:
    """Read a JSON value, as a ``type`` for argparse."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        known = {"text": text, "error": error}
        raise argparse.ArgumentTypeError(
            _("%(text)r is not JSON: %(error)s. A text needs two kinds of quotes: '\"a text\"'.") % known
        ) from error


@contextmanager
def wrong_arguments() -> Iterator[None]:
    """Raise ``WrongArguments`` with the message of an error of the call."""
    try:
        yield
    except (ConfigurationError, StepError, ValueError) as error:
        raise WrongArguments(str(error)) from error


#: SQLSTATEs of a missing right and of a missing table.
NO_RIGHT, NO_TABLE = "42501", "42P01"


@contextmanager
def plain_refusals() -> Iterator[None]:
    """Raise ``CommandError`` if the server cannot be reached, or if a right or a table is missing."""
    try:
        yield
    except (DatabaseError, InterfaceError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        sqlstate = getattr(error.__cause__, "sqlstate", None)
        if sqlstate == NO_RIGHT:
            hint = _("The rights that a role needs are listed in docs/worker.md#rights-in-the-database.")
        elif sqlstate == NO_TABLE:
            hint = _("Run manage.py migrate for this database, or name the one with the tables by --database.")
        elif isinstance(error, (OperationalError, InterfaceError)):
            hint = _("The database did not execute this command.")
        else:
            raise
        raise CommandError(f"{reason}. {hint}") from error
