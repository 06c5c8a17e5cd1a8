"""Rescue reads only running tasks."""

from __future__ import annotations

import pytest

from django_pglock.store.rescue import RESCUE
from django_pglock.store.statements import filled
from tests.plans.reading import plan_of, reads

pytestmark = pytest.mark.django_db


def test_rescue_looks_only_at_what_runs(history):
    sql = filled(RESCUE)
    used = reads(plan_of(sql, (4.5, 5.25, 6.6, 30.0, 1000, 1000, 3, "x", "y")))
    assert "Seq Scan" not in {kind for kind, _ in used}
