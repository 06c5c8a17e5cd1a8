"""Whether a PostgreSQL answers at DATABASE_URL, asked before a demo begins. The messages show no password."""

from __future__ import annotations

import re
from typing import Any

import environ
import psycopg

from example_project.postgres import NoPostgres

#: Seconds in which the server has to answer.
PATIENCE = 5
WAY_OUT = "Write postgres://USER:PASSWORD@HOST:5432/NAME, or unset DATABASE_URL to use a private PostgreSQL."


def require_postgres(url: str) -> None:
    """Raise ``NoPostgres`` unless a PostgreSQL answers at the URL and lets the user in."""
    typed = f"DATABASE_URL is {masked(url)!r}"
    try:
        settings = environ.Env.db_url_config(url)
    except Exception:
        settings = {}
    if settings.get("ENGINE") != "django.db.backends.postgresql":
        raise NoPostgres(f"{typed}, which is no PostgreSQL. {WAY_OUT}")
    try:
        psycopg.connect(**_parameters(settings)).close()
    except psycopg.Error as error:
        raise NoPostgres(f"{typed}, and no PostgreSQL answers there: {_sentence(error)}. {WAY_OUT}") from None


def masked(url: str) -> str:
    """Return the URL with asterisks instead of a password."""
    # Up to the last @, because a password that is not quoted may have one, too.
    url = re.sub(r"(://[^:/@]*:).*@", r"\1***@", url)
    return re.sub(r"(password=)[^&]*", r"\1***", url)


def _parameters(settings: dict[str, Any]) -> dict[str, Any]:
    names = {"HOST": "host", "PORT": "port", "USER": "user", "PASSWORD": "password", "NAME": "dbname"}
    given = {name: settings[key] for key, name in names.items() if settings.get(key)}
    return {"connect_timeout": PATIENCE, **settings.get("OPTIONS", {}), **given}


def _sentence(error: psycopg.Error) -> str:
    """Return the message on one line, without the hints that follow the first one."""
    return str(error).strip().partition("\n")[0].rstrip(".")
