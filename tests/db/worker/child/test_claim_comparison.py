"""A worker compares the table with its claims only while the table may have claims that the worker does not know."""

from __future__ import annotations

import time
from uuid import uuid4

import pytest
from django.test import override_settings

from django_pglock.conf import Settings
from django_pglock.models import Task
from django_pglock.worker.child.fetcher import CERTAIN_AFTER, ClaimComparison
from django_pglock.worker.child.in_flight import InFlight
from tests.sample import tasks
from tests.settings_slow_beats import DJANGO_PGLOCK

pytestmark = pytest.mark.django_db(transaction=True)

LIMIT = Settings(**DJANGO_PGLOCK).HEARTBEAT_LIMIT


@pytest.fixture
def in_flight():
    return InFlight(2)


@pytest.fixture
def comparison(in_flight, settings):
    settings.DJANGO_PGLOCK = DJANGO_PGLOCK
    made = ClaimComparison(in_flight, "default", uuid4())
    made._compared_at -= LIMIT
    return made


def again(comparison):
    """Compare, and let the limit pass."""
    comparison.compare_if_due()
    comparison._compared_at -= LIMIT
    return comparison.is_due


def test_a_claim_whose_answer_was_lost_is_given_back_by_a_later_comparison(comparison, in_flight, claim):
    """Its date is younger than the limit at the first comparison, so there has to be a later one."""
    in_flight.answer_lost_at = time.monotonic()
    tasks.nothing.enqueue()
    claim(worker=comparison.worker)
    assert comparison.is_due
    assert again(comparison)
    assert Task.objects.get().status == "RUNNING", "its answer may still come"
    with override_settings(DJANGO_PGLOCK={**DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 0.01}):
        time.sleep(0.2)
        in_flight.answer_lost_at = time.monotonic()
        comparison.compare_if_due()
    assert Task.objects.get().status == "READY"
    in_flight.answer_lost_at -= CERTAIN_AFTER * LIMIT
    assert not comparison.is_due


def test_a_sleeping_fetcher_compares(worker, claim, eventually, settings, monkeypatch):
    """Nothing is in flight and nobody notifies it, so it would sleep for many poll intervals."""
    monkeypatch.setattr("django_pglock.worker.child.fetcher.LISTENING_FACTOR", 10**9)
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 0.1, "POLL_INTERVAL": 0.5}
    process = worker(queues=["another"])
    eventually(lambda: process.fetcher._are_others_empty)
    tasks.nothing.enqueue()
    claim(worker=process.id)
    process.in_flight.answer_lost_at = time.monotonic()
    eventually(Task.objects.filter(status="READY").exists)
