"""The plans of the statements that a page of the admin has sent."""

from __future__ import annotations

import json

from django.db import connection

from tests.plans.reading import executed, rows_read


def plans(queries):
    """Explain each statement that reads the table of tasks."""
    for sql in (each["sql"] for each in queries):
        if '"django_pglock_task"' in sql and sql.lstrip("( ").startswith(("SELECT", "WITH")):
            with connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN (FORMAT JSON) {sql}")
                plan = cursor.fetchone()[0]
            yield sql, plan if isinstance(plan, list) else json.loads(plan)


def most_read(queries):
    return max(rows_read(executed(sql)) for sql, _plan in plans(queries))
