"""Admission reads the first tasks of a key, beside whatever backlog."""

from __future__ import annotations

import pytest

from django_pglock.store.admit import ADMIT
from django_pglock.store.statements import filled
from tests.plans.reading import BATCH, ROW, STATEMENTS, executed, insert, nodes, pages_read, rated, reads, rows_read

pytestmark = pytest.mark.django_db


#: Statements of admission to one key, and how often each reads the table: what it takes to plan them.
SMALL = {
    "ADMIT_NEXT": ((["backlog"],), 4),
    "ADMIT_OWN": (("backlog", "backlog", 1, 1), 2),
    "ENQUEUE_AT_KEY": (("backlog", "backlog", *ROW, *[None] * 9, "b"), 1),
    "ENQUEUE_AT_RATE": (rated(1, ROW), 1),
}


def test_admission_looks_at_a_key_by_its_index_and_does_not_read_what_is_for_later(backlog):
    """Both in one test, because to insert a backlog takes longer than to execute every plan."""
    small_statements_look_at_a_key_by_its_index()
    insert("SCHEDULED", 10_000, lock="backlog", seconds=60)
    plan = executed(filled(ADMIT), (["backlog"],), by_index=True)
    assert rows_read(plan) < 20 * BATCH
    assert pages_read(plan) < 400


def small_statements_look_at_a_key_by_its_index():
    for name, (params, count) in SMALL.items():
        plan = executed(filled(STATEMENTS[name]), params, by_index=True)
        table = [node for node in nodes(plan) if node.get("Relation Name") == "django_pglock_task"]
        scans = [node for node in table if "Scan" in node["Node Type"]]
        assert len(scans) == count, name
        by_key = [node for node in scans if node.get("Index Name") == "pglock_task_lock"]
        assert len(by_key) == (2 if name == "ADMIT_NEXT" else 1), name
        assert max(node["Actual Rows"] for node in by_key) <= 1, name
        assert {kind for kind, _ in reads(plan)} <= {"Index Scan", "Index Only Scan"}, name
