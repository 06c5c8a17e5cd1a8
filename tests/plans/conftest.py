from __future__ import annotations

import pytest
from django.db import connection


@pytest.fixture
def new_table(db):
    """A table of tasks without what other tests rolled back: that is still there, dead, and the planner counts it."""
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE django_pglock_task CASCADE")
