"""Workers of other queues are woken by one index probe for each queue."""

from __future__ import annotations

from django_pglock.store.statements import filled
from django_pglock.store.wake import WAKE_OTHERS
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "WAKE_OTHERS": Call(filled(WAKE_OTHERS), ("channel", ["default", "other", "empty"])),
    }


def test_ready_tasks_are_looked_for_by_a_probe_for_each_queue(plans):
    plans.check()
