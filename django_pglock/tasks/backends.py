"""The backends of ``TASKS`` that belong to this package, and the databases that store their tasks."""

from __future__ import annotations

from typing import Any

from django_pglock.errors import ConfigurationError
from django_pglock.postgres.connections import connection_for
from django_pglock.tasks.compat import task_backends

_HINT = "In one entry of TASKS, set BACKEND to django_pglock.backend.PostgresBackend and OPTIONS to the database."


def our_backends() -> list[Any]:
    """Return the backends of ``TASKS`` that belong to this package."""
    return [backend for backend in task_backends.all() if hasattr(backend, "database")]


def database_of_backend(alias: str) -> str:
    """Return the database alias of a backend of ``TASKS``. Raises ``ConfigurationError`` for a backend of others."""
    ours: dict[str, str] = {backend.alias: backend.database for backend in our_backends()}
    if alias not in ours:
        known = ", ".join(sorted(ours))
        raise ConfigurationError(f"TASKS has no backend {alias!r} of django_pglock. Its backends: {known}.")
    return ours[alias]


def database_of_tasks(alias: str | None, *, option: str) -> str:
    """Return the given database alias or, without one, the alias that the backends in ``TASKS`` use.

    Raises ``ConfigurationError`` if the backends use none or several, and for an alias that is not in ``DATABASES``.
    ``option`` is what the message recommends to choose one of several databases.
    """
    if alias is None:
        aliases = sorted({backend.database for backend in our_backends()})
        if not aliases:
            raise ConfigurationError(f"No backend in TASKS stores its tasks in PostgreSQL. {_HINT}")
        if len(aliases) > 1:
            known = ", ".join(aliases)
            raise ConfigurationError(f"The backends in TASKS use several databases: {known}. Choose one with {option}.")
        [alias] = aliases
    connection_for(alias)
    return alias


def require_tasks(database: str) -> None:
    """Raise ``ConfigurationError`` for a database without tasks.

    A worker would find none there, and with ``drain`` it would end as if all were done.
    """
    if not any(backend.database == database for backend in our_backends()):
        raise ConfigurationError(f"No backend in TASKS stores its tasks in the database {database!r}. {_HINT}")
