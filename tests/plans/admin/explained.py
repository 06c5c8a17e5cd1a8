"""The plans of the statements that a page of the admin has sent."""

from __future__ import annotations

import json

from tests.plans.reading import executed, rows_read
from tests.sql import execute_sql


def plans(queries):
    """Explain each statement that reads the table of tasks."""
    for sql in (each["sql"] for each in queries):
        if '"django_pglock_task"' in sql and sql.lstrip("( ").startswith(("SELECT", "WITH")):
            plan = execute_sql(f"EXPLAIN (FORMAT JSON) {sql}")[0][0]
            yield sql, plan if isinstance(plan, list) else json.loads(plan)


def most_read(queries):
    return max(rows_read(executed(sql)) for sql, _plan in plans(queries))
