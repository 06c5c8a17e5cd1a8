"""A claim walks its index and stops."""

from __future__ import annotations

from django_pglock.store.claim import claim_statement
from tests.plans.reading import BATCH, PATH, nodes, reads
from tests.plans.store.backlog import Call


def calls(backlog):
    paths = [PATH, "tests.sample.tasks.echo"]
    plain = claim_statement("default", worker=backlog.worker, paths=paths)
    behind = claim_statement("default", worker=backlog.worker, paths=paths, behind=True)
    return {
        "of one": Call(plain.sql(1, "default"), by_index=True),
        "of some": Call(plain.sql(BATCH, "default"), by_index=True),
        "of many": Call(plain.sql(1000, "default"), by_index=True),
        "behind the last": Call(behind.sql(BATCH, "default", 0, 0), by_index=True),
    }


def test_a_claim_walks_the_ready_index_in_order(plans):
    plans.check()
    for name, plan in plans.items():
        assert "Seq Scan" not in {kind for kind, _ in reads(plan)}, name
        if name != "behind the last":
            assert ("Index Scan", "pglock_task_ready") in reads(plan), name
            assert "Sort" not in {node["Node Type"] for node in nodes(plan)}, name
