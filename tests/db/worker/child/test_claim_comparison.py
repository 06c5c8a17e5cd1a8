"""A worker compares the table with its claims only while the table may have claims that the worker does not know."""

from __future__ import annotations

import time

import pytest
from django.test import override_settings

from django_pglock.conf import Settings
from django_pglock.models import Task
from django_pglock.worker.child.feeder import CERTAIN_AFTER
from tests.db.worker.conftest import make_feeder
from tests.sample import tasks
from tests.settings_slow_beats import DJANGO_PGLOCK

pytestmark = pytest.mark.django_db(transaction=True)

LIMIT = Settings(**DJANGO_PGLOCK).HEARTBEAT_LIMIT


@pytest.fixture
def feeder(settings):
    settings.DJANGO_PGLOCK = DJANGO_PGLOCK
    return make_feeder()


def compare(feeder):
    """Compare if the table may have other claims, and the limit has passed. Return whether it was necessary."""
    before = feeder._compared_at = feeder._compared_at - LIMIT
    feeder._compare_if_due()
    return feeder._compared_at > before


def test_a_claim_whose_answer_was_lost_is_given_back_by_a_later_comparison(feeder, claim):
    """Its date is younger than the limit at the first comparison, so there has to be a later one."""
    assert not compare(feeder), "there was no claim"
    feeder.in_flight.changed_at = time.monotonic()
    tasks.nothing.enqueue()
    claim(worker=feeder.worker)
    assert compare(feeder)
    assert Task.objects.get().status == "RUNNING", "its answer may still come"
    with override_settings(DJANGO_PGLOCK={**DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 0.01}):
        time.sleep(0.2)
        feeder.in_flight.changed_at = time.monotonic()
        assert compare(feeder)
    assert Task.objects.get().status == "READY"
    feeder.in_flight.changed_at -= CERTAIN_AFTER * LIMIT
    assert not compare(feeder)


def test_a_sleeping_feeder_compares(worker, claim, eventually, settings, monkeypatch):
    """Otherwise it would sleep for many poll intervals, because it finds nothing and nobody notifies it."""
    monkeypatch.setattr("django_pglock.worker.child.feeder.LISTENING_FACTOR", 10**9)
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 0.1, "POLL_INTERVAL": 0.5}
    process = worker(queues=["another"])
    eventually(lambda: process.feeder._is_rest_empty)
    tasks.nothing.enqueue()
    claim(worker=process.id)
    process.in_flight.changed_at = time.monotonic()
    process.in_flight.notify_feeder()
    eventually(Task.objects.filter(status="READY").exists)
