"""The arguments of commands: their conversion, the database that a command works on, and its refusals as messages."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from django.core.management.base import CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, DatabaseError, InterfaceError, OperationalError, connections
from django.utils.translation import gettext as _

from django_pglock.errors import ConfigurationError
from django_pglock.tasks.backends import database_of_tasks

T = TypeVar("T")


class WrongArguments(CommandError):
    """Arguments that the parser accepts and the command does not. The exit code is 2, as for errors of the parser."""

    def __init__(self, text: str) -> None:
        super().__init__(text, returncode=2)


def read_by(read: Callable[[str], T]) -> Callable[[str], T]:
    """Return a ``type`` for argparse that shows the message of a ``ValueError``. argparse itself drops the message."""

    def parse(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def positive(text: str) -> int:
    """Return a number of rows. Raises ``ArgumentTypeError`` for a text that cannot be one."""
    # Python reads neither all digits that Unicode has, nor thousands of them.
    number = int(text) if text.isdecimal() and len(text) < 10 else 0
    if not 1 <= number <= 1_000_000:
        raise argparse.ArgumentTypeError(_("%r is not a number from 1 to 1,000,000") % text)
    return number


#: SQLSTATEs of a missing right and of a missing table.
NO_RIGHT, NO_TABLE = "42501", "42P01"


@contextmanager
def plain_refusals() -> Iterator[None]:
    """Raise ``CommandError`` if the server cannot be reached, or if a right or a table is missing."""
    before = _failed()
    try:
        yield
    except (DatabaseError, InterfaceError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        sqlstate = getattr(error.__cause__, "sqlstate", None)
        if sqlstate == NO_RIGHT:
            hint = _("The rights that a role needs are listed in docs/security.md.")
        elif sqlstate == NO_TABLE:
            others = sorted(_failed() - before - {DEFAULT_DB_ALIAS})
            hint = " ".join([_("Run: manage.py migrate django_pglock"), *(f"--database {alias}" for alias in others)])
        elif isinstance(error, (OperationalError, InterfaceError)):
            hint = _("The database did not execute this command.")
        else:
            raise
        raise CommandError(f"{reason}. {hint}") from error


def _failed() -> set[str]:
    """Return the aliases of the databases in which a statement has failed."""
    return {each.alias for each in connections.all(initialized_only=True) if each.errors_occurred}


def add_database(parser: CommandParser) -> None:
    """Add the option --database."""
    parser.add_argument(
        "--database", help=_("Database alias of the tasks (default: the one that the backends in TASKS use).")
    )


def chosen_database(alias: str | None) -> str:
    """Return the database alias of the option --database or, without one, the one that the backends in ``TASKS`` use.

    Raises ``WrongArguments`` if the backends use none or several, and for an alias that is not in ``DATABASES``.
    """
    try:
        return database_of_tasks(alias, option="--database")
    except ConfigurationError as error:
        raise WrongArguments(str(error)) from None
