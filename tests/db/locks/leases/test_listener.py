"""Candidates that wait for a lease are woken when it is released."""

from __future__ import annotations

import threading
import time

import pytest
from django.test import override_settings

from django_pglock import Lease, LockNotAvailable, leader
from tests.conftest import NEVER
from tests.db.locks.sessions import sessions_of_leases

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_waiting_candidate_is_woken_when_the_leader_resigns(in_threads, monkeypatch):
    """A notification wakes it: the next poll would come when the lease expires."""
    monkeypatch.setattr("django_pglock.locks.lease_thread.LEASE_POLL", 600.0)
    elected, entered = threading.Event(), []

    def lead(number):
        if number:
            elected.wait(60)
        with leader("a", ttl=300) as leadership:
            entered.append(leadership.token)
            elected.set()
            if not number:
                time.sleep(0.55)

    in_threads(lead, 2)
    assert entered == [1, 2]


def test_of_several_candidates_one_at_a_time_is_the_leader(in_threads, eventually):
    leading, tokens = [], []

    def lead(number):
        for _ in range(5):
            with leader("a", ttl=30) as leadership:
                leading.append(number)
                assert len(leading) == 1
                tokens.append(leadership.token)
                leading.remove(number)

    in_threads(lead, 4)
    assert tokens == list(range(1, 21))
    eventually(lambda: sessions_of_leases() == 0, why="nobody has a lease, and sessions stay open")


def test_a_candidate_without_success_raises_at_its_timeout(monkeypatch):
    monkeypatch.setattr("django_pglock.locks.lease_thread.LEASE_POLL", 600.0)
    with Lease("a", ttl=300):
        began = time.monotonic()
        with pytest.raises(LockNotAvailable, match=r"0\.3 s"), leader("a", timeout=0.3):
            pass
        assert 0.3 <= time.monotonic() - began < NEVER


@override_settings(DJANGO_PGLOCK={"SLOW_LOCK": 0.05})
def test_a_candidate_is_there_to_wait_and_is_not_warned_of(in_threads, caplog):
    elected = threading.Event()

    def lead(number):
        if number:
            elected.wait(60)
        with leader("a", ttl=300):
            elected.set()
            time.sleep(0.1 if not number else 0)

    in_threads(lead, 2)
    assert "Acquired lease" not in caplog.text
