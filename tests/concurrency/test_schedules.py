"""Many workers read the same schedules, and each tick is enqueued by one of them."""

from __future__ import annotations

import time

import pytest

from django_pglock import task
from django_pglock.models import Task
from tests.db.store.schedules import enqueue_due, register
from tests.sample import scheduled

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]

PATHS = ["tests.sample.scheduled.hourly", "tests.sample.scheduled.nightly"]


def test_five_workers_enqueue_each_of_many_ticks_once(in_threads):
    for function in (scheduled.nightly, scheduled.hourly):
        task(every=0.1)(function)
    register()
    deadline = time.monotonic() + 1.5

    def keep(number):
        enqueued = []
        while time.monotonic() < deadline or Task.objects.count() < 6:
            enqueued += enqueue_due().tasks
        return enqueued

    enqueued = [id_ for each in in_threads(keep, 5) for id_ in each]
    assert len(enqueued) == len(set(enqueued)) == Task.objects.count()
    ticks = list(Task.objects.values_list("task_path", "meta__schedule"))
    assert len(set(ticks)) == len(ticks)
    assert sorted({path for path, _ in ticks}) == PATHS
