"""The database that a command works on, and its refusals as messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.core.management.base import CommandError, CommandParser
from django.db import DEFAULT_DB_ALIAS, DatabaseError, InterfaceError, OperationalError, connections
from django.utils.translation import gettext as _

from django_pglock.errors import ConfigurationError
from django_pglock.management.arguments import WrongArguments
from django_pglock.tasks.backends import database_of_tasks

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
