from __future__ import annotations

import pytest
from django.db import connection


@pytest.fixture
def new_table(db):
    """A table of tasks without what other tests rolled back, which the planner counts, and without statistics.

    Autovacuum analyzes the table now and then, with the rows of other tests, and TRUNCATE leaves the statistics.
    """
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE django_pglock_task CASCADE")
        cursor.execute("DELETE FROM pg_statistic WHERE starelid = 'django_pglock_task'::regclass")
