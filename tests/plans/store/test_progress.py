"""Progress and logs are written into rows that are found by their ids."""

from __future__ import annotations

from uuid import uuid4

import pytest

from django_pglock.models import Task
from django_pglock.store.requests_to_worker import WRITE_LAST_PROGRESS, WRITE_LOGS, WRITE_PROGRESS
from django_pglock.store.statements import filled
from tests.plans.reading import analyze, comparisons, executed, insert, reads
from tests.plans.store.backlog import Call


def calls(backlog):
    values = (backlog.ids, backlog.ones, backlog.texts)
    return {
        "WRITE_PROGRESS": Call(filled(WRITE_PROGRESS), values),
        "WRITE_LAST_PROGRESS": Call(filled(WRITE_LAST_PROGRESS), values),
        "WRITE_LOGS": Call(filled(WRITE_LOGS), values),
    }


def test_progress_finds_its_rows_by_index(plans):
    plans.check()
    for plan in plans.values():
        assert "Seq Scan" not in {kind for kind, _ in reads(plan)}


@pytest.mark.django_db
def test_progress_is_written_with_few_comparisons_of_rows(new_table):
    """The planner expects few rows, and chooses a nested loop that compares each pair."""
    analyze()
    insert("RUNNING", 1000, worker=uuid4())
    ids = list(Task.objects.order_by("pk").values_list("pk", flat=True))[:200]
    plan = executed(filled(WRITE_PROGRESS), (ids, [1] * len(ids), ["null"] * len(ids)))
    assert comparisons(plan) <= 100_000
