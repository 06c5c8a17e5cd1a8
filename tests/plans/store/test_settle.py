"""A batch of outcomes finds its rows by key."""

from __future__ import annotations

import pytest

from django_pglock.store.settle import SETTLE_SUCCESSES
from django_pglock.store.sql import filled
from tests.plans.reading import plan_of, reads

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("batch", [1, 500])
def test_a_settle_finds_its_rows_by_key(history, batch):
    ids = list(range(1, batch + 1))
    sql = filled(SETTLE_SUCCESSES)
    assert "Seq Scan" not in {kind for kind, _ in reads(plan_of(sql, (ids, [1] * batch, ["null"] * batch)))}
