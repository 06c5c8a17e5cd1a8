"""Finds tables that a version before the first release has made and that lack what its later migrations added."""

from __future__ import annotations

from typing import Any

#: The last migration that there was before the first release, when one migration took the place of thirteen.
LAST_BEFORE_RELEASE = "0013_validate_run_after"
# Whether there is a table of tasks without the constraint that this migration added. Today's first migration creates
# the constraint with the table.
HAS_PRERELEASE_TABLES = """
SELECT to_regclass('django_pglock_task') IS NOT NULL AND NOT EXISTS (
    SELECT FROM pg_constraint
    WHERE conrelid = to_regclass('django_pglock_task') AND conname = 'pglock_task_run_after' AND convalidated)
"""


def has_prerelease_tables(connection: Any) -> bool:
    """Return whether the tables were made before the first release, and never migrated to its schema.

    ``migrate`` has nothing to do there, because the only migration, ``0001_initial``, is recorded as applied.
    """
    with connection.cursor() as cursor:
        cursor.execute(HAS_PRERELEASE_TABLES)
        return bool(cursor.fetchone()[0])
