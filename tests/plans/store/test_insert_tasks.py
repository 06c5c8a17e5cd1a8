"""A task with a lock key is enqueued beside a backlog at this key."""

from __future__ import annotations

from django_pglock.store.insert_tasks import AT_KEY, at_key
from tests.plans.reading import CALL, scans_by_key
from tests.plans.store.backlog import Call
from tests.sample import keyed_tasks as keyed


def calls(backlog):
    assert "task.lock_key BETWEEN" in AT_KEY
    return {"AT_KEY": Call(at_key("default", keyed.step, CALL, "{}"), by_index=True)}


def test_enqueueing_at_a_key_reads_only_the_first_tasks_of_the_key(plans):
    plans.check()
    assert scans_by_key(plans["AT_KEY"]) == [1, 1]
