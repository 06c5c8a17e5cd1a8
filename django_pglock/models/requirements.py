"""The databases that our tables can be in."""

from __future__ import annotations

from typing import Any

#: The last migration that there was before the first release, when one migration took the place of thirteen.
LAST_BEFORE_RELEASE = "0013_validate_run_after"
#: Whether there is a table of tasks that this migration has not changed, and that the one of today has not made.
IS_UNFINISHED = """
SELECT to_regclass('django_pglock_task') IS NOT NULL AND NOT EXISTS (
    SELECT FROM pg_constraint
    WHERE conrelid = to_regclass('django_pglock_task') AND conname = 'pglock_task_run_after' AND convalidated)
"""


class OnPostgreSQL:
    """The base of each model's ``Meta``: in databases of other vendors there is no table, and no system check warns.

    Without a router Django migrates every app in every database of the project. ``migrate`` and the test runners skip
    a model whose ``required_db_vendor`` is another one. The system checks of indexes, constraints and defaults ask for
    the features instead.
    """

    required_db_vendor = "postgresql"
    required_db_features = (
        "supports_covering_indexes",
        "supports_expression_defaults",
        "supports_json_field",
        "supports_partial_indexes",
        "supports_table_check_constraints",
    )


def has_unfinished_tables(connection: Any) -> bool:
    """Return whether the tables were made before the first release, and never migrated to its schema.

    ``migrate`` has nothing to do there: the only migration, ``0001_initial``, is recorded as applied.
    """
    with connection.cursor() as cursor:
        cursor.execute(IS_UNFINISHED)
        return bool(cursor.fetchone()[0])
