"""The lock keys with waiting tasks, and the tasks that hold a lock key."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models.functions import Now

from django_pglock.models import Task
from django_pglock.store.admit import blocked_keys, holders
from tests.sample import keyed_tasks as keyed

pytestmark = pytest.mark.django_db(transaction=True)


def test_keys_at_which_tasks_wait_are_returned_in_order_each_once():
    for order in (3, 1, 2, 2, 1):
        keyed.step.enqueue(order)
    assert blocked_keys("default", "") == ["order:1", "order:2"], "no task waits at the third"
    assert blocked_keys("default", "", limit=1) == ["order:1"]
    assert blocked_keys("default", "order:1") == ["order:2"]
    assert blocked_keys("default", "order:2") == []


def test_a_key_is_held_by_tasks_that_are_admitted_or_will_be_retried():
    first, *_ = (int(keyed.step.enqueue(1).id) for _ in range(3))
    assert holders("default", "order:1", limit=5) == [first]
    later = int(keyed.step.using(run_after=timedelta(hours=1)).enqueue(1).id)
    assert holders("default", "order:1", limit=5) == [first], "one that has never run holds no key"
    Task.objects.filter(pk=later).update(started_at="2026-01-01T00:00Z")
    assert holders("default", "order:1", limit=5) == [first, later]
    assert holders("default", "order:1", limit=1) == [first]
    Task.objects.filter(pk=first).update(status="SCHEDULED", started_at=Now(), run_after=Now())
    Task.objects.filter(pk=later).update(status="READY")
    assert holders("default", "order:1", limit=5) == [first, later], "by id, and not by status"
    assert holders("default", "order:2", limit=5) == []
