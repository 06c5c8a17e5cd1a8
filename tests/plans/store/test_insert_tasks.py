"""A task with a lock key is enqueued beside a backlog at this key."""

from __future__ import annotations

from django_pglock.store.insert_tasks import ENQUEUE_AT_KEY
from django_pglock.store.statements import filled
from tests.plans.reading import ROW, scans_by_key
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "ENQUEUE_AT_KEY": Call(
            filled(ENQUEUE_AT_KEY), ("backlog", "backlog", *ROW, *[None] * 9, "backlog"), by_index=True
        ),
    }


def test_enqueueing_at_a_key_reads_only_the_first_tasks_of_the_key(plans):
    plans.check()
    assert scans_by_key(plans["ENQUEUE_AT_KEY"]) == [1, 1]
