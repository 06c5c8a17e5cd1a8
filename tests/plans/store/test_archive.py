"""The statements of the archive walk the primary keys, and read the partition of a day alone if the day is known."""

from __future__ import annotations

import pytest
from django.db import connection

from django_pglock.store import archive
from django_pglock.store.archive import NEXT_TO_ARCHIVE, archive_window
from django_pglock.store.statements import filled
from tests.plans.reading import BATCH, executed, nodes, reads, rows_read
from tests.plans.store.backlog import Call

pytestmark = pytest.mark.django_db


def calls(backlog):
    return {"NEXT_TO_ARCHIVE": Call(filled(NEXT_TO_ARCHIVE), (0.0, 0.0, 0.0, backlog.ids[0], BATCH))}


def test_the_next_window_is_read_beside_a_backlog(plans):
    plans.check()


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
