"""What a task waits for, and the queues of its worker, are found by their ids."""

from __future__ import annotations

from uuid import uuid4

from django_pglock.store.await_end import AWAITED_IN_WORKER
from django_pglock.store.statements import filled
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "AWAITED_IN_WORKER": Call(filled(AWAITED_IN_WORKER), (uuid4(), backlog.ids[0])),
    }


def test_an_awaited_task_is_found_by_a_few_probes(plans):
    plans.check()
