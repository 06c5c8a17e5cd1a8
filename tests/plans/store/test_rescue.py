"""Rescue reads only running tasks, and compares them in batches."""

from __future__ import annotations

import math
from uuid import uuid4

import pytest

from django_pglock.store.rescue import POSSIBLY_LOST, RESCUE, RESCUED_AT_ONCE, rescue
from django_pglock.store.statements import filled
from tests.plans.reading import analyze, comparisons, executed, insert
from tests.plans.store.backlog import Call


def values(limit):
    # Heartbeats count as recent for an hour: a slow machine takes long to fill the tables.
    return 3600.0, 3600.0, 3600.0, limit, limit, 3, "x", "x", "y"


def calls(_backlog):
    return {
        "RESCUE": Call(filled(RESCUE), values(1000), by_index=True),
        "POSSIBLY_LOST": Call(filled(POSSIBLY_LOST), (3600.0, 3600.0, None), by_index=True),
    }


def test_rescue_reads_only_tasks_of_workers_that_may_be_dead(plans):
    plans.check()


@pytest.mark.django_db
def test_tasks_of_a_dead_worker_are_compared_some_at_a_time(new_table):
    """The planner expects few tasks. For a thousand tasks of a dead worker it made a million comparisons."""
    analyze()
    insert("RUNNING", 1000, worker=uuid4())
    assert comparisons(executed(filled(RESCUE), values(RESCUED_AT_ONCE), by_index=True)) <= 100_000
    assert [len(rescue("default", unbroken=math.inf)) for _ in range(6)] == [RESCUED_AT_ONCE] * 5 + [0]
