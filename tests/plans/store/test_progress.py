"""Progress finds its rows by index."""

from __future__ import annotations

import pytest

from django_pglock.store.statements import filled
from tests.plans.reading import STATEMENTS, plan_of, reads

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("statement", ["NOTE_PROGRESS", "NOTE_LAST_PROGRESS"])
def test_progress_finds_its_rows_by_index(history, statement):
    sql = filled(STATEMENTS[statement])
    assert "Seq Scan" not in {kind for kind, _ in reads(plan_of(sql, ([1, 2], [1, 1], ["1", "2"])))}
