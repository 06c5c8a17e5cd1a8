"""A batch of outcomes finds its rows by key."""

from __future__ import annotations

import pytest

from django_pglock.store.settle import SETTLE_SUCCESSES, SETTLE_UNOBSERVED
from django_pglock.store.statements import filled
from tests.plans.reading import plan_of, reads

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("batch", [1, 500])
@pytest.mark.parametrize("statement", [SETTLE_SUCCESSES, SETTLE_UNOBSERVED], ids=["observed", "unobserved"])
def test_a_settle_finds_its_rows_by_key(history, statement, batch):
    values = (list(range(1, batch + 1)), [1] * batch, "[]", batch)
    plan = plan_of(filled(statement), values[: statement.count("%s")])
    assert "Seq Scan" not in {kind for kind, _ in reads(plan)}
