"""SQL on Django's connection."""

from __future__ import annotations

from typing import Any

from django.db import connection


def execute_sql(statement: str, values: Any = None) -> list[tuple[Any, ...]]:
    """Execute a statement, and return its rows."""
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        return cursor.fetchall() if cursor.description else []
