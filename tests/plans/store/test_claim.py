"""A claim walks its index and stops."""

from __future__ import annotations

from uuid import uuid4

import pytest

from django_pglock.store.claim import claim_statement
from tests.plans.reading import nodes, plan_of, reads

pytestmark = pytest.mark.django_db


def test_a_claim_walks_the_ready_index_in_order(history):
    paths = ["tests.sample.tasks.nothing", "tests.sample.tasks.echo"]
    plan = plan_of(claim_statement("default", worker=uuid4(), paths=paths).sql(10, "q1"))
    assert ("Index Scan", "pglock_task_ready") in reads(plan)
    assert "Seq Scan" not in {kind for kind, _ in reads(plan)}
    assert "Sort" not in {node["Node Type"] for node in nodes(plan)}
