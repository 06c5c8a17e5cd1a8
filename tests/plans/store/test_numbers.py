"""The numbers are written and read by their indexes, beside the rows of other periods."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from django.db import connection

from django_pglock.store.count import COUNTED
from django_pglock.store.numbers import (
    ADD_NUMBERS,
    ATTEMPT_KINDS,
    BEGIN_DEPTHS,
    PRUNE_NUMBERS,
    QUEUES_OF_ATTEMPTS,
    READ_DEPTHS,
    SERIES,
    SERIES_OF_FUNCTION,
    TOTALS,
    WRITE_DEPTHS,
)
from django_pglock.store.statements import filled
from tests.plans.reading import executed, nodes, pages_read

pytestmark = pytest.mark.django_db

#: Minutes, queues, and functions of each queue.
SPAN, QUEUES, FUNCTIONS = 600, 5, 5
NOW = datetime(2026, 11, 22, 12, tzinfo=timezone.utc)
HOUR_AGO = NOW - timedelta(hours=1)
KINDS, STATUSES = [*ATTEMPT_KINDS], [*COUNTED]
ROW = ([60], ["f1"], ["q1"], [NOW.timestamp() - 60], ["ran"], [1], [0.1], ["{1,2}"])
DEPTHS = (["READY"], ["q1"], [5], [1.0], NOW.timestamp() - 60, STATUSES)


@pytest.fixture
def periods(db):
    with connection.cursor() as cursor:
        cursor.execute(
            """INSERT INTO django_pglock_number (seconds, started_at, queue, task_path, kind, count, total, buckets)
               SELECT seconds, %s - n * make_interval(secs => seconds),
                      CASE WHEN q = 0 THEN '' ELSE 'q' || q END, CASE WHEN f = 0 OR q = 0 THEN '' ELSE 'f' || f END,
                      kind, 1, 1, '{0,0,0,1}'
               FROM generate_series(1, %s) AS n, generate_series(0, %s) AS q, generate_series(0, %s) AS f,
                    unnest(ARRAY[60, 3600]) AS seconds, unnest(ARRAY['succeeded', 'ran', 'waited', 'READY']) AS kind
               WHERE (q > 0 OR f = 0) AND (kind <> 'READY' OR f = 0 AND seconds = 60)""",
            [NOW, SPAN, QUEUES, FUNCTIONS],
        )
        cursor.execute(
            """INSERT INTO django_pglock_number (seconds, started_at, queue, task_path, kind, count, total, buckets)
               VALUES (0, to_timestamp(0), '', '', 'counted', 0, %s, '{}')""",
            [NOW.timestamp() - 60],
        )
        cursor.execute("ANALYZE django_pglock_number")


STATEMENTS = {
    "everything": (SERIES, (60, "", "", HOUR_AGO, NOW, KINDS), 3 * 60),
    "a queue": (SERIES, (60, "", "q1", HOUR_AGO, NOW, KINDS), 3 * 60),
    "a function in a queue": (SERIES, (60, "f1", "q1", HOUR_AGO, NOW, KINDS), 3 * 60),
    "a function": (SERIES_OF_FUNCTION, (60, "f1", HOUR_AGO, NOW, KINDS), 3 * 60 * QUEUES),
    "functions": (TOTALS, (60, HOUR_AGO, NOW, KINDS), 3 * 60 * QUEUES * (FUNCTIONS + 1)),
    "counters": (TOTALS, (0, datetime(1970, 1, 1, tzinfo=timezone.utc), HOUR_AGO, KINDS), 10),
    "pruning": (PRUNE_NUMBERS, (60, 0.0, 100), 300),
    "adding": (ADD_NUMBERS, ROW, 10),
    "a count of depths": (BEGIN_DEPTHS, (60.0,), 10),
    "writing depths": (WRITE_DEPTHS, DEPTHS, 150),
    "reading depths": (READ_DEPTHS, (STATUSES,), 150),
    "queues with attempts": (QUEUES_OF_ATTEMPTS, (), 10 * QUEUES),
}


def test_no_statement_reads_other_periods(periods):
    """All plans in one test, because to insert the rows takes longer than to execute every plan."""
    plans = {name: executed(filled(sql), values) for name, (sql, values, _most) in STATEMENTS.items()}
    kinds = {name: {node["Node Type"] for node in nodes(plan)} for name, plan in plans.items()}
    assert [name for name in plans if "Seq Scan" in kinds[name]] == []
    pages = {name: pages_read(plan) for name, plan in plans.items()}
    assert {name: count for name, count in pages.items() if count > 2 * STATEMENTS[name][2] + 60} == {}
