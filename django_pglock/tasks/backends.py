"""The backends of ``TASKS`` that belong to this package, and the databases that store their tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from django_pglock.errors import ConfigurationError
from django_pglock.keys import name_of
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


def backend_for(*key: Any, backends: Sequence[str]) -> str:
    """Return the alias of the backend for the tasks of a key: ``charge.using(backend=backend_for(customer.pk, ...))``.

    ``key`` has the same parts as the name of a lock. ``backends`` are aliases of ``TASKS``, in any order. The same key
    and backends give the same alias in each process. If a backend is added, it takes its share of the keys from all
    others, and no other key moves; if one is removed, only its keys move. This is rendezvous hashing: D. Thaler and
    C. Ravishankar, "Using name-based mappings to increase hit rates", 1998.

    Raises ``LockKeyError`` for invalid parts of a name, and ``ValueError`` without backends.
    """
    if isinstance(backends, str) or not backends:
        raise ValueError(f"backends is {backends!r}; give the aliases of at least one backend, as a list.")
    name = str(name_of(*key))
    return max(backends, key=lambda alias: (_weight(alias, name), alias))


def _weight(alias: str, name: str) -> bytes:
    # The length separates the two, so that no other pair has the same text.
    return hashlib.sha256(f"{len(alias)}:{alias}:{name}".encode()).digest()
