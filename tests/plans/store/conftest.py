"""Tables for the plans of the store's statements."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.db import connection

from django_pglock.models import Task
from tests.plans.reading import BATCH, analyze, insert

FINISHED = """
INSERT INTO django_pglock_task (status, queue, task_path, backend, enqueued_at, finished_at)
SELECT CASE WHEN n %% 50 = 0 THEN 'FAILED' ELSE 'SUCCESSFUL' END, 'q' || n %% 3, 'tests.sample.tasks.nothing',
       'default', at.moment, at.moment
FROM generate_series(1, %s) AS n
CROSS JOIN LATERAL (SELECT now() - interval '2 hours' - (%s - n) * interval '3 days' / %s AS moment) AS at
"""


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


@pytest.fixture(params=["without statistics", "with statistics"])
def finished(request, new_table):
    """Twenty thousand finished tasks of three days, with many that wait behind them."""
    with connection.cursor() as cursor:
        cursor.execute(FINISHED, [20_000, 20_000, 20_000])
    insert("READY", 5000)
    insert("RUNNING", BATCH, worker=uuid4())
    if request.param == "with statistics":
        analyze()
    return list(Task.objects.order_by("pk").values_list("pk", flat=True))
