"""Which database a command about tasks is for."""

from __future__ import annotations

from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext as _

from django_pglock.errors import ConfigurationError
from django_pglock.postgres.connections import connection_for
from django_pglock.worker.options import our_backends


def add_database(parser: CommandParser) -> None:
    """Add the option of the database."""
    parser.add_argument(
        "--database", help=_("Database alias of the tasks (default: that of the backend in TASKS, if there is one).")
    )


def database_of_tasks(alias: str | None) -> str:
    """Return the alias that was given or, if none was, the one where the backends of ``TASKS`` have their tasks.

    Raises ``CommandError`` if that is none or several, and for an alias that is not there.
    """
    if alias is None:
        aliases = sorted({backend.database for backend in our_backends()})
        if not aliases:
            raise no_backend(_("No backend of TASKS has its tasks in PostgreSQL."))
        if len(aliases) > 1:
            known = ", ".join(aliases)
            raise CommandError(_("TASKS has tasks in several databases: %s. Choose one with --database.") % known)
        [alias] = aliases
    try:
        connection_for(alias)
    except ConfigurationError as error:
        raise CommandError(str(error)) from None
    return alias


def no_backend(what: str) -> CommandError:
    """Return the refusal of a database that no backend of ``TASKS`` uses, with what to do about it."""
    hint = _("Set BACKEND to django_pglock.backend.PostgresBackend and OPTIONS to the database in one of TASKS.")
    return CommandError(f"{what} {hint}")
