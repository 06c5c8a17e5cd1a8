"""Tables for the plans of the store's statements."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.db import connection

from tests.plans.reading import BATCH, analyze, insert


@pytest.fixture
def history(new_table):
    """Twenty thousand finished rows, two thousand waiting, and statistics that know it."""
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


@pytest.fixture(params=["none", "of an empty table", "from before", "of now"])
def backlog(request, new_table):
    """A long history, twenty thousand waiting for one key and as many for a date, and a few others.

    The statistics are those of a new table, of a table that was empty once, of the history only, or they know
    everything.
    """
    worker = uuid4()
    if request.param == "of an empty table":
        analyze()
    insert("SUCCESSFUL", 20_000)
    if request.param == "from before":
        analyze()
    insert("BLOCKED", 20_000, lock="backlog")
    insert("SCHEDULED", 20_000, seconds=60)
    insert("READY", BATCH)
    insert("READY", BATCH, fair="tenant")
    insert("RUNNING", BATCH, worker=worker)
    if request.param == "of now":
        analyze()
    return worker
