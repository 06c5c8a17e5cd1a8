"""The statements of the archive walk the primary keys, and read the partition of a day alone if the day is known."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_pglock.models import ArchivedTask, Task
from django_pglock.store import archive, schedule_runs
from django_pglock.store.archive import NEXT_TO_ARCHIVE, archive_window
from django_pglock.store.archive_state import archive_state, bounds_of, table_of, turn_on
from django_pglock.store.archived import ARE_ARCHIVED, find_archived
from django_pglock.store.statements import filled
from tests.plans.reading import BATCH, analyze, executed, insert, nodes, reads, rows_read

pytestmark = pytest.mark.django_db

FILL = """
INSERT INTO django_pglock_task (status, queue, task_path, backend, enqueued_at, finished_at)
SELECT CASE WHEN n %% 50 = 0 THEN 'FAILED' ELSE 'SUCCESSFUL' END, 'q' || n %% 3, 'tests.sample.tasks.nothing',
       'default', at.moment, at.moment
FROM generate_series(1, %s) AS n
CROSS JOIN LATERAL (SELECT now() - interval '2 hours' - (%s - n) * interval '3 days' / %s AS moment) AS at
"""


@pytest.fixture(params=["without statistics", "with statistics"])
def finished(request, new_table):
    """Twenty thousand finished tasks of three days, with many that wait behind them."""
    with connection.cursor() as cursor:
        cursor.execute(FILL, [20_000, 20_000, 20_000])
    insert("READY", 5000)
    insert("RUNNING", BATCH, worker=uuid4())
    if request.param == "with statistics":
        analyze()
    return list(Task.objects.order_by("pk").values_list("pk", flat=True))


def archive_all():
    after = 0
    while (after := archive_window("default", after, 7.0)[1]) or False:
        pass


def indexes(plan):
    return {node["Index Name"] for node in nodes(plan) if "Index Name" in node}


def tables(plan):
    return {node["Relation Name"] for node in nodes(plan) if "Relation Name" in node}


def test_the_next_window_is_read_by_the_key(finished):
    first = finished[0]
    plan = executed(filled(NEXT_TO_ARCHIVE), (3600.0, 7 * 86400.0, 3600.0, first, 100))
    assert reads(plan) == {("Index Scan", "django_pglock_task_pkey")}
    assert rows_read(plan) == 100


def test_a_batch_reads_its_window_and_nothing_else(finished, monkeypatch):
    """EXPLAIN ANALYZE of each part, in the transaction in which the parts are sent together."""
    plans = []

    def explain(using, limits, lock, move):
        with connection.cursor() as cursor:
            cursor.execute("SAVEPOINT before")
            for statement, values in (limits, lock, move):
                prefix = "" if statement is limits[0] else "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) "
                cursor.execute(prefix + filled(statement), values)
                plans.append(cursor.fetchone()[0])
            cursor.execute("ROLLBACK TO before")
        return [(0,)]

    archive_window("default", finished[0] - 1, 7.0, batch=10)
    monkeypatch.setattr(archive, "run_together", explain)
    archive_window("default", finished[5000], 7.0, batch=100)
    _, lock, move = plans
    assert reads(lock) == {("Index Scan", "django_pglock_task_pkey")}
    assert rows_read(lock) <= 100
    assert {kind for kind, _ in reads(move)} <= {"Index Scan", "Bitmap Heap Scan"}
    # Once to find the rows; their ids are known.
    assert rows_read(move) <= 200
    assert "Seq Scan" not in {node["Node Type"] for plan in (lock, move) for node in nodes(plan)}


def test_a_task_is_found_by_the_key_of_each_partition(finished):
    turn_on("default")
    archive_all()
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE django_pglock_archivedtask")
    ids = list(ArchivedTask.objects.order_by("pk").values_list("pk", flat=True)[:BATCH])
    with CaptureQueriesContext(connection) as queries:
        assert find_archived("default", ids[0]).pk == ids[0]
    plans = [executed(queries[-1]["sql"]), executed(filled(ARE_ARCHIVED), ["{" + ",".join(map(str, ids)) + "}"])]
    path = "tests.sample.tasks.nothing"
    plans.append(executed(filled(schedule_runs.SCHEDULE_RUNS_ARCHIVED), (ids[-1], path, path, 20)))
    for plan in plans:
        assert "Seq Scan" not in {node["Node Type"] for node in nodes(plan)}
        assert any("archivedtask" in name for name in indexes(plan))


def test_a_day_is_read_from_its_partition(finished):
    archive_all()
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE django_pglock_archivedtask")
    day = archive_state("default").days[1]
    start, end = bounds_of(day)
    rows = ArchivedTask.objects.filter(finished_at__gte=start, finished_at__lt=end).order_by("-pk")
    sql, values = rows.values("pk")[:BATCH].query.get_compiler("default").as_sql()
    plan = executed(sql, values)
    assert tables(plan) == {table_of(day)}
    assert {node["Node Type"] for node in nodes(plan) if "Scan" in node["Node Type"]} <= {
        "Index Scan",
        "Index Only Scan",
    }
    scanned = sum(node["Actual Rows"] for node in nodes(plan) if "Scan" in node["Node Type"])
    assert scanned <= 2 * BATCH
