"""Tables for the plans of the store's statements."""

from __future__ import annotations

import pytest
from django.db import connection


@pytest.fixture(scope="module")
def twenty_two_thousand(fill):
    fill(write_history)


@pytest.fixture
def history(twenty_two_thousand, db):
    """Twenty thousand finished rows, two thousand waiting, and statistics that know it."""


def write_history():
    with connection.cursor() as cursor:
        cursor.execute(
            """INSERT INTO django_pglock_task (queue, task_path, backend, status, finished_at, run_after, priority)
               SELECT 'q' || n % 5, 'tests.sample.tasks.nothing', 'default',
                      CASE WHEN n <= 20000 THEN 'SUCCESSFUL' WHEN n <= 21000 THEN 'READY' ELSE 'SCHEDULED' END,
                      CASE WHEN n <= 20000 THEN now() END, CASE WHEN n > 21000 THEN now() + n * interval '1 s' END,
                      n % 3
               FROM generate_series(1, 22000) AS n"""
        )
        cursor.execute("ANALYZE django_pglock_task")
