"""Rows of the project that refer to tasks. Their foreign keys refuse the deletion of these tasks."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.db.models import BooleanField, F, Func

from django_pglock.store.statements import run

# The foreign keys from the project's tables to tasks that refuse a deletion, if this role may read their columns.
# Foreign keys of Django models have no ON DELETE in the database, whatever ``on_delete`` is. The database's own check
# at the end of the transaction needs no rights.
REFUSING_KEYS = """
SELECT conrelid::regclass::text, quote_ident(attname)
FROM pg_constraint JOIN pg_attribute ON attrelid = conrelid AND attnum = conkey[1]
WHERE contype = 'f' AND confrelid = to_regclass('{task}') AND confdeltype IN ('a', 'r') AND conparentid = 0
  AND conrelid NOT IN (to_regclass('{attempt}'), to_regclass('{waiter}'))
  AND has_column_privilege(conrelid, attnum, 'SELECT')
ORDER BY 1, 2
"""


class ForeignKey(NamedTuple):
    """A column that refers to tasks, with quoted names."""

    table: str
    column: str


def refusing_keys(using: str) -> list[ForeignKey]:
    """Return the foreign keys of the project that refuse the deletion of a task."""
    return [ForeignKey(*row) for row in run(using, REFUSING_KEYS)]


def unreferenced(tasks: Any) -> Any:
    """Return the tasks to which no row of the project refers by such a foreign key. Reads the catalog."""
    for key in refusing_keys(tasks.db):
        column = f"referring.{key.column}"
        # A subquery instead of NOT EXISTS, which is a join, as ``statements.py`` says.
        names = f"SELECT {column} FROM {key.table} AS referring WHERE {column}".replace("%", "%%%%")
        template = f"({names} = %(expressions)s LIMIT 1) IS NULL"
        tasks = tasks.filter(Func(F("pk"), template=template, output_field=BooleanField()))
    return tasks
