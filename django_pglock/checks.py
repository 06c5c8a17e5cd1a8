"""System checks: one function for each problem, a stable id, and a hint that says what to type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import django
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, register
from django.core.checks import Warning as Caution
from django.db import DatabaseError, connections

from django_pglock.conf import get_settings
from django_pglock.errors import ConfigurationError

#: The oldest server that is supported, and the one that works but is not tested.
OLDEST_SERVER = 15


@register("django_pglock")
def check_settings(**kwargs: Any) -> list[CheckMessage]:
    """E001: an option of DJANGO_PGLOCK that does not exist or cannot be."""
    try:
        get_settings()
    except ConfigurationError as error:
        return [Error(str(error), hint="Mend DJANGO_PGLOCK in your settings.", id="django_pglock.E001")]
    return []


@register("django_pglock")
def check_databases(**kwargs: Any) -> list[CheckMessage]:
    """E002: an alias that locks or tasks use is not there, or is not PostgreSQL."""
    problems: list[CheckMessage] = []
    for alias, source in sorted(_aliases().items()):
        if alias not in connections.settings:
            message = f"{source} names the database {alias!r}, which is not in DATABASES."
        elif connections[alias].vendor != "postgresql":
            message = f"{source} uses the database {alias!r}, which is {connections[alias].vendor}, not PostgreSQL."
        else:
            continue
        problems.append(Error(message, hint=f"Name a PostgreSQL database in {source}.", id="django_pglock.E002"))
    return problems


@register("django_pglock")
def check_psycopg(**kwargs: Any) -> list[CheckMessage]:
    """E003: psycopg 2 only. Without notifications and pipelines of psycopg 3 the worker cannot do its work."""
    if find_spec("psycopg") is not None:
        return []
    return [Error("django_pglock needs psycopg 3.", hint="pip install 'psycopg[binary]>=3.2'", id="django_pglock.E003")]


@register("django_pglock")
def check_backport(**kwargs: Any) -> list[CheckMessage]:
    """E004: Django 5.2 has no django.tasks of its own, and the backport is missing."""
    is_needed = django.VERSION < (6, 0) and bool(getattr(settings, "TASKS", None))
    if not is_needed or find_spec("django_tasks") is not None:
        return []
    return [
        Error(
            "TASKS is set, but Django 5.2 has no django.tasks.",
            hint="pip install 'django-tasks>=0.12', or upgrade to Django 6.0.",
            id="django_pglock.E004",
        )
    ]


@register("django_pglock")
def check_atomic_requests(**kwargs: Any) -> list[CheckMessage]:
    """W002: every request runs in a transaction, where a session lock is refused."""
    try:
        wanted = get_settings()
    except ConfigurationError:
        return []
    if wanted.SCOPE != "session" or not settings.DATABASES.get(wanted.USING, {}).get("ATOMIC_REQUESTS"):
        return []
    return [
        Caution(
            "ATOMIC_REQUESTS runs every view in a transaction, where locks of the scope 'session' are refused.",
            hint="Set DJANGO_PGLOCK['SCOPE'] to 'auto', or take views with locks out with non_atomic_requests.",
            id="django_pglock.W002",
        )
    ]


@register(Tags.database)
def check_server(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """E005, W003 and W001: the server's age, and a pooler in between. Silent when the server cannot be reached."""
    problems: list[CheckMessage] = []
    for alias in sorted(set(databases or []) & set(_aliases())):
        if connections[alias].vendor == "postgresql":
            try:
                problems += _check_one(alias)
            except DatabaseError:
                # Whoever cannot reach the server will hear of it from everything else.
                continue
    return problems


def _check_one(alias: str) -> Iterable[CheckMessage]:
    connection: Any = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid(), current_setting('server_version_num')::int / 10000")
        pid, version = cursor.fetchone()
    if version < OLDEST_SERVER - 1:
        hint = f"Upgrade to PostgreSQL {OLDEST_SERVER} or newer."
        yield Error(f"Database {alias!r} is PostgreSQL {version}.", hint=hint, id="django_pglock.E005")
    elif version < OLDEST_SERVER:
        hint = f"It works as far as we know; tested is PostgreSQL {OLDEST_SERVER} and newer."
        yield Caution(f"Database {alias!r} is PostgreSQL {version}.", hint=hint, id="django_pglock.W003")
    if _is_pooled(connection, pid) and get_settings().SCOPE != "transaction":
        yield Caution(
            f"Database {alias!r} is reached through a pooler: libpq's backend is not the server's. In transaction "
            "mode, session locks would be taken on one session and freed on another.",
            hint="Set DJANGO_PGLOCK['SCOPE'] = 'transaction' and run runlockworker with --no-listen, or on an alias "
            "that goes directly to the server.",
            id="django_pglock.W001",
        )


def _is_pooled(connection: Any, pid: int) -> bool:
    return bool(connection.connection.info.backend_pid != pid)


def _aliases() -> dict[str, str]:
    """Return the aliases that locks and tasks use, each with the setting that names it."""
    try:
        aliases = {get_settings().USING: "DJANGO_PGLOCK['USING']"}
    except ConfigurationError:
        aliases = {}
    for name, backend in (getattr(settings, "TASKS", None) or {}).items():
        if str(backend.get("BACKEND", "")).startswith("django_pglock."):
            alias = backend.get("OPTIONS", {}).get("database", "default")
            aliases.setdefault(alias, f"TASKS[{name!r}]['OPTIONS']['database']")
    return aliases
