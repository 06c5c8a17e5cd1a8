"""What the tests of the parent may use."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection


def fetch(sql: str, *values: Any) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, values or None)
        return cursor.fetchall() if cursor.description else []


def sessions(name: str) -> list[int]:
    """Return the process numbers of the server for the sessions with this name."""
    found = fetch(
        "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND datname = current_database()",
        f"lockworker {name}",
    )
    return [pid for (pid,) in found]


def terminate(name: str) -> None:
    for pid in sessions(name):
        fetch("SELECT pg_terminate_backend(%s)", pid)


@pytest.fixture
def probed(worker):
    return lambda **options: worker(probe_port="127.0.0.1:0", **options)
