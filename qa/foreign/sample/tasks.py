"""Task functions of a project."""

from __future__ import annotations

from django.db import connection

from django_pglock import task
from qa.foreign.sample.models import Letter


@task
def write(text: str) -> int:
    return Letter.objects.create(text=text).pk


@task
def nothing(*args: object, **kwargs: object) -> None:
    """Do nothing."""


@task
def session_settings(*names: str) -> list[str]:
    """Return settings of the server as the session of the task has them."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting(name) FROM unnest(%s::text[]) AS name", [list(names)])
        return [value for (value,) in cursor.fetchall()]


@task(max_attempts=2, backoff=0)
def fail(text: str) -> None:
    raise ValueError(text)
