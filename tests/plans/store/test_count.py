"""Counts walk partial indexes and stop."""

from __future__ import annotations

import pytest

from django_pglock.store.count import COUNT_OTHERS, COUNT_READY
from django_pglock.store.sql import filled
from tests.plans.reading import nodes, plan_of, reads

pytestmark = pytest.mark.django_db


def test_counts_of_queues_walk_partial_indexes_and_stop(history):
    ready = plan_of(filled(COUNT_READY), (["q1", "q2"], 100, 100))
    assert {index for _, index in reads(ready)} == {"pglock_task_ready", "pglock_task_fair"}
    others = plan_of(filled(COUNT_OTHERS), (100,))
    assert {index for _, index in reads(others)} == {"pglock_task_attention"}
    assert not [each for each in nodes([ready, others]) if each["Node Type"] == "Sort" and each["Plan Rows"] > 1000]
