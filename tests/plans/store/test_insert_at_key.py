"""A task with a lock key or a rate is enqueued beside a backlog at this key."""

from __future__ import annotations

from django_pglock.store.insert_at_key import ENQUEUE_AT_KEY, ENQUEUE_AT_RATE
from django_pglock.store.statements import filled
from tests.plans.reading import BATCH, ROW, rated, scans_by_key
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "ENQUEUE_AT_KEY": Call(
            filled(ENQUEUE_AT_KEY), ("backlog", "backlog", *ROW, *[None] * 9, "backlog"), by_index=True
        ),
        "ENQUEUE_AT_RATE": Call(filled(ENQUEUE_AT_RATE), rated(BATCH, ROW), by_index=True),
        "ENQUEUE_AT_RATE of one": Call(filled(ENQUEUE_AT_RATE), rated(1, ROW), by_index=True),
    }


def test_enqueueing_at_a_key_reads_only_the_first_tasks_of_the_key(plans):
    plans.check()
    for name in ("ENQUEUE_AT_KEY", "ENQUEUE_AT_RATE of one"):
        assert scans_by_key(plans[name]) == [1, 1], name
