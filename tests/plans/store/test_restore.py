"""Tasks move back from one partition, along its key."""

from __future__ import annotations

from django_pglock.store.archive_state import archive_state, bounds_of, table_of
from django_pglock.store.restore import RESTORE
from django_pglock.store.statements import filled
from tests.plans.reading import BATCH, executed, nodes


def test_a_batch_reads_its_window_of_the_day(archived):
    day = archive_state("default").days[1]
    bounds = bounds_of(day)
    plan = executed(filled(RESTORE), [*bounds, 0, BATCH, *bounds])
    read = [node for node in nodes(plan) if node.get("Relation Name", "").startswith("django_pglock_archivedtask")]
    assert {node["Relation Name"] for node in read} >= {table_of(day)}
    scans = [node for node in read if "Scan" in node["Node Type"]]
    assert {node["Node Type"] for node in scans} <= {"Index Scan", "Bitmap Heap Scan"}
    assert sum(node["Actual Rows"] * node["Actual Loops"] for node in scans) <= 2 * BATCH
