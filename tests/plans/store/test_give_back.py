"""Claims are given back by the index of running tasks."""

from __future__ import annotations

from django_pglock.store.settle import GIVE_BACK
from django_pglock.store.statements import filled
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "GIVE_BACK": Call(filled(GIVE_BACK), (*[backlog.worker] * 3, [1], 0.0, None, None, []), by_index=True),
    }


def test_give_back_reads_only_tasks_of_the_worker(plans):
    plans.check()
