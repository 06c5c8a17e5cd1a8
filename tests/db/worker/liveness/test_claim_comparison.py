"""A worker compares the table with its claims only while the table may have claims that the worker does not know."""

from __future__ import annotations

import time
from uuid import uuid4

import pytest
from django.test import override_settings

from django_pglock.models import Task
from django_pglock.worker.in_flight import InFlight
from django_pglock.worker.liveness.claim_comparison import CERTAIN_AFTER, ClaimComparison
from tests.sample import tasks
from tests.settings_slow_beats import DJANGO_PGLOCK

pytestmark = pytest.mark.django_db(transaction=True)

LIMIT = DJANGO_PGLOCK["HEARTBEAT_LIMIT"]


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
    comparison.compare()
    comparison._compared_at -= LIMIT
    return comparison.is_due


def test_a_worker_without_claims_compares_no_claims(comparison):
    assert not comparison.is_due


def test_a_worker_with_claims_compares_them_once_each_heartbeat_limit(comparison, in_flight, claim):
    tasks.nothing.enqueue()
    in_flight.add(claim(worker=comparison.worker))
    assert comparison.is_due
    comparison._compared_at += LIMIT
    assert not comparison.is_due, "too early"
    comparison._compared_at -= LIMIT
    assert again(comparison)
    in_flight.claims.clear()
    assert comparison.is_due, "some were in flight at the last comparison"
    assert not again(comparison)


def test_a_worker_compares_its_claims_once_after_the_last_one_has_ended(comparison, in_flight, claim):
    tasks.nothing.enqueue()
    in_flight.add(claim(worker=comparison.worker))
    in_flight.claims.clear()
    assert comparison.is_due
    assert not again(comparison)


def test_a_claim_whose_answer_was_lost_is_given_back_by_a_later_comparison(comparison, in_flight, claim):
    """Its date is younger than the limit at the first comparison, so there has to be a later one."""
    in_flight.note_lost_answer()
    tasks.nothing.enqueue()
    claim(worker=comparison.worker)
    assert comparison.is_due
    assert again(comparison)
    assert Task.objects.get().status == "RUNNING", "its answer may still come"
    with override_settings(DJANGO_PGLOCK={**DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 0.01, "HEARTBEAT_LIMIT": 0.1}):
        time.sleep(0.2)
        comparison.compare()
    assert Task.objects.get().status == "READY"
    in_flight.answer_lost_at -= CERTAIN_AFTER * LIMIT
    assert not comparison.is_due


def test_claims_are_not_compared_while_a_claim_is_in_flight(comparison, in_flight):
    in_flight.note_lost_answer()
    in_flight.is_claiming = True
    assert not comparison.is_due
    compared_at = comparison._compared_at
    comparison.compare()
    assert comparison._compared_at == compared_at
