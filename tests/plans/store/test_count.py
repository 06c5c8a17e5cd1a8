"""Counts walk partial indexes and stop."""

from __future__ import annotations

import pytest

from django_pglock.models import Task
from django_pglock.store.count import COUNT_FAILED, COUNT_OTHERS, COUNT_READY
from django_pglock.store.statements import filled
from tests.plans.reading import BATCH, analyze, insert, nodes, plan_of, reads
from tests.plans.store.backlog import Call


def calls(_backlog):
    return {
        "COUNT_READY": Call(filled(COUNT_READY), (["default", "other"], 3, BATCH, BATCH)),
        "COUNT_FAILED": Call(filled(COUNT_FAILED), [BATCH] * 4),
        "COUNT_OTHERS": Call(filled(COUNT_OTHERS), [BATCH]),
    }


def test_counts_stop_at_their_limits(plans):
    plans.check()


@pytest.mark.django_db
def test_counts_of_queues_walk_partial_indexes_and_stop(history):
    ready = plan_of(filled(COUNT_READY), (["q1", "q2"], 3, 100, 100))
    assert reads(ready) == {
        ("Index Only Scan", "pglock_task_ready"),
        ("Index Only Scan", "pglock_task_fair"),
        ("Index Scan", "django_pglock_task_pkey"),
    }
    for number in range(5):
        insert("FAILED", 300)
        Task.objects.filter(status="FAILED", queue="default").update(queue=f"failed {number}", fingerprint=number)
    analyze()
    others = plan_of(filled(COUNT_OTHERS), (100,))
    assert {index for _, index in reads(others)} == {"pglock_task_attention"}
    failed = plan_of(filled(COUNT_FAILED), (1000, 100, 100, 100))
    assert reads(failed) == {("Index Only Scan", "pglock_task_fingerprint")}
    assert not [
        each for each in nodes([ready, others, failed]) if each["Node Type"] == "Sort" and each["Plan Rows"] > 1000
    ]
