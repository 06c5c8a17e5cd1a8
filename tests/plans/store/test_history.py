"""The history is written and read by its indexes, beside the rows of other periods."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from django.db import connection

from django_pglock.store.history import ADD_HISTORY, HISTORY_OF, HISTORY_OF_FUNCTION, PRUNE_HISTORY, TOTAL_HISTORY
from django_pglock.store.statements import filled
from tests.plans.reading import executed, nodes, pages_read

pytestmark = pytest.mark.django_db

#: Minutes, queues, and functions of each queue.
SPAN, QUEUES, FUNCTIONS = 600, 5, 5
NOW = datetime(2026, 11, 22, 12, tzinfo=timezone.utc)
HOUR_AGO = NOW - timedelta(hours=1)
ROW = ([60], [NOW.timestamp() - 60], ["q1"], ["f1"], *[[1]] * 6, [0.1], [0.1], ["{1,2}"], ["{0,0,3}"])


@pytest.fixture
def periods(db):
    with connection.cursor() as cursor:
        cursor.execute(
            """INSERT INTO django_pglock_taskhistory (seconds, started_at, queue, task_path, succeeded, failed, retried,
                   cancelled, snoozed, lost, wait_seconds, run_seconds, wait, run)
               SELECT seconds, %s - n * make_interval(secs => seconds),
                      CASE WHEN q = 0 THEN '' ELSE 'q' || q END, CASE WHEN f = 0 OR q = 0 THEN '' ELSE 'f' || f END,
                      1, 0, 0, 0, 0, 0, 1, 1, '{0,0,1}', '{0,0,0,1}'
               FROM generate_series(1, %s) AS n, generate_series(0, %s) AS q, generate_series(0, %s) AS f,
                    unnest(ARRAY[60, 3600]) AS seconds
               WHERE q > 0 OR f = 0""",
            [NOW, SPAN, QUEUES, FUNCTIONS],
        )
        cursor.execute("ANALYZE django_pglock_taskhistory")


STATEMENTS = {
    "everything": (HISTORY_OF, (60, "", "", HOUR_AGO, NOW), 60),
    "a queue": (HISTORY_OF, (60, "", "q1", HOUR_AGO, NOW), 60),
    "a function in a queue": (HISTORY_OF, (60, "f1", "q1", HOUR_AGO, NOW), 60),
    "a function": (HISTORY_OF_FUNCTION, (60, "f1", HOUR_AGO, NOW), 60 * QUEUES),
    "functions": (TOTAL_HISTORY, (60, HOUR_AGO, NOW, True, None, None), 60 * QUEUES * (FUNCTIONS + 1)),
    "queues": (TOTAL_HISTORY, (60, HOUR_AGO, NOW, False, None, None), 60 * QUEUES * (FUNCTIONS + 1)),
    "pruning": (PRUNE_HISTORY, (60, 0.0, 100), 300),
    "adding": (ADD_HISTORY, ROW, 10),
}


def test_no_statement_reads_other_periods(periods):
    """All plans in one test, because to insert the rows takes longer than to execute every plan."""
    plans = {name: executed(filled(sql), values) for name, (sql, values, _most) in STATEMENTS.items()}
    kinds = {name: {node["Node Type"] for node in nodes(plan)} for name, plan in plans.items()}
    assert [name for name in plans if "Seq Scan" in kinds[name]] == []
    pages = {name: pages_read(plan) for name, plan in plans.items()}
    assert {name: count for name, count in pages.items() if count > 2 * STATEMENTS[name][2] + 60} == {}
