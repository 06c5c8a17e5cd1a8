"""The statements about leases, also after an expiry, a release and a lost answer."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connection
from django.db.models.functions import Now

from django_pglock import Lease, LockNotAvailable
from django_pglock.locks.lease_thread import ACQUIRE, RELEASE, RENEW
from django_pglock.models import Lease as Row
from tests import server_clock

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_released_lease_stays_unavailable_until_min_hold_is_over():
    """Two hosts start a nightly job. Their clocks differ by less than min_hold, and the job takes almost no time."""
    with Lease("nightly", ttl=60, min_hold=5):
        first = Row.objects.get().acquired_at
    with pytest.raises(LockNotAvailable), Lease("nightly", ttl=60):
        pass
    with Lease("nightly", ttl=60, timeout=60):
        assert Row.objects.get().acquired_at - first >= timedelta(seconds=5)


def run(statement, holder, *, ttl=60.0, min_hold=0.0):
    """Execute a statement for an attempt of a holder, and return its first row."""
    seconds = {"ttl": None if ttl is None else timedelta(seconds=ttl), "min_hold": timedelta(seconds=min_hold)}
    about = {"key": 7, "name": "a", "owner": "o", "holder": holder, **seconds}
    with connection.cursor() as cursor:
        cursor.execute(statement, about)
        return cursor.fetchone() if cursor.description else None


def expire():
    Row.objects.update(expires_at=Now())


@pytest.mark.parametrize("ttl", [None, 60.0])
def test_a_candidate_learns_when_the_lease_of_the_holder_expires(ttl):
    assert run(ACQUIRE, uuid4(), ttl=ttl) == (1, None)
    token, seconds = run(ACQUIRE, uuid4())
    assert token is None
    assert seconds is None if ttl is None else 0 < seconds <= ttl


def test_an_expired_lease_is_neither_renewed_nor_released_although_nobody_else_has_taken_it():
    mine = uuid4()
    run(ACQUIRE, mine)
    expire()
    assert run(RENEW, mine) is run(RELEASE, mine) is None


def test_a_late_holder_changes_nothing_of_the_next_lease():
    late, mine = uuid4(), uuid4()
    run(ACQUIRE, late)
    expire()
    assert run(ACQUIRE, mine) == (2, None)
    assert run(RENEW, late) is run(RELEASE, late) is None
    assert run(RENEW, mine) == (2,)


def test_a_released_lease_is_not_renewed_while_its_min_hold_lasts():
    mine = uuid4()
    run(ACQUIRE, mine)
    assert run(RELEASE, mine, min_hold=60)
    assert Row.objects.get().expires_at > Row.objects.get().released_at
    assert run(RENEW, mine) is run(RELEASE, mine) is None
    assert run(ACQUIRE, uuid4())[0] is None


def end_of(row):
    return (row.expires_at - row.server_time).total_seconds()


def lease():
    return Row.objects.all().with_state().get()


def test_a_released_lease_is_free_although_the_clock_was_put_back():
    mine = uuid4()
    run(ACQUIRE, mine)
    assert run(RELEASE, mine)
    server_clock.put_back(300)
    assert not lease().is_kept
    assert run(ACQUIRE, uuid4()) == (2, None)


def test_a_holder_that_died_before_the_clock_was_put_back_keeps_the_lease_for_its_ttl_only():
    run(ACQUIRE, uuid4())
    server_clock.put_back(300)
    assert run(ACQUIRE, uuid4())[0] is None, "the holder may live, and renew it"
    assert 50 < end_of(lease()) <= 60
    server_clock.put_back(-61)
    assert run(ACQUIRE, uuid4()) == (2, None)


def test_a_holder_that_lives_keeps_the_lease_although_the_clock_was_put_back():
    mine = uuid4()
    run(ACQUIRE, mine)
    server_clock.put_back(300)
    assert run(RENEW, mine) == (1,)
    assert run(ACQUIRE, uuid4())[0] is None
    assert run(RENEW, mine) == (1,)
    assert 50 < end_of(lease()) <= 60


def test_min_hold_lasts_no_longer_although_the_clock_was_put_back():
    """Before the release, or after it."""
    mine = uuid4()
    run(ACQUIRE, mine)
    server_clock.put_back(300)
    run(RENEW, mine)
    assert run(RELEASE, mine, min_hold=30)
    assert lease().is_kept
    assert 20 < end_of(lease()) <= 30
    server_clock.put_back(300)
    assert run(ACQUIRE, uuid4())[0] is None
    assert 20 < end_of(lease()) <= 30
    assert lease().is_kept
    server_clock.put_back(-31)
    assert run(ACQUIRE, uuid4()) == (2, None)
