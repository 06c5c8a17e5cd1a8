"""The holder of a lease: it renews the lease, notices its loss, and releases it."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import pytest

from django_pglock import Lease, LockError, LockLost, LockNotAvailable, leader, signals
from django_pglock.locks import lease_thread
from django_pglock.models import Lease as Row
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


def now():
    return execute_sql("SELECT clock_timestamp()")[0][0]


def test_a_lease_is_renewed_while_it_is_held():
    with Lease("long", ttl=6) as lease:
        first = Row.objects.get()
        while now() < first.expires_at:
            lease.assert_held()
            with pytest.raises(LockNotAvailable), Lease("long"):
                pass
            time.sleep(0.05)
        row = Row.objects.get()
        assert (row.token, row.holder, row.acquired_at) == (first.token, first.holder, first.acquired_at)
        assert row.renewed_at > first.renewed_at
    assert not lease.lost.is_set()


def test_extend_moves_the_expiry_of_a_lease():
    with Lease("long", ttl=5) as lease:
        lease.extend(500)
        assert Row.objects.get().expires_at - now() > timedelta(seconds=450)
        lease.extend()
        assert Row.objects.get().ttl == timedelta(seconds=500)
    with Lease("endless") as lease, pytest.raises(LockError, match="has no ttl"):
        lease.extend(5)


def test_a_shortened_lease_is_renewed_sooner(eventually):
    with Lease("long", ttl=60) as lease:
        lease.extend(6)
        with pytest.raises(ValueError, match=r"0\.3"):
            lease.extend(0)
        first = Row.objects.get()
        eventually(lambda: now() > first.expires_at)
        lease.assert_held()
        assert Row.objects.get().ttl == timedelta(seconds=6)


def test_a_candidate_gets_the_lease_of_a_dead_holder_when_it_expires(monkeypatch):
    """The candidate gets it as soon as it expires. The next poll would come after the timeout."""
    monkeypatch.setattr("django_pglock.locks.lease_thread.LEASE_POLL", 600.0)
    with Lease("a", ttl=60) as lease:
        pass
    Row.objects.update(released_at=None, expires_at=now() + timedelta(seconds=5), holder=lease._holder._id)
    with pytest.raises(LockNotAvailable), Lease("a", ttl=5):
        pass
    with Lease("a", ttl=60, timeout=60) as lease:
        assert lease.token == 2


def test_a_revoked_lease_is_noticed(eventually):
    heard = []
    signals.lock_lost.connect(receiver := lambda sender, handle, **kwargs: heard.append(handle.name))
    try:
        with pytest.raises(LockLost, match="revoked"), Lease("a", ttl=3) as lease:
            assert Row.objects.all().free() == 1
            assert lease.lost.wait(60)
            with pytest.raises(LockLost):
                lease.assert_held()
            with pytest.raises(LockLost):
                lease.extend()
    finally:
        signals.lock_lost.disconnect(receiver)
    assert heard == ["a"]
    with pytest.raises(ZeroDivisionError), Lease("a", ttl=0.6):
        Row.objects.all().free()
        1 / 0  # noqa: B018
    with pytest.raises(LockLost), Lease("mutex"):
        Row.objects.all().free()


def test_a_lease_whose_renewals_are_blocked_is_lost_when_it_expires(somebody):
    """Another transaction locks the row, so renewals hang. The holder does not wait for them."""
    with pytest.raises(LockLost, match=r"could not be renewed for 2 s"), Lease("a", ttl=2) as lease:
        with somebody.connection.cursor() as cursor:
            cursor.execute("BEGIN; SELECT 1 FROM django_pglock_lease FOR UPDATE")
        assert lease.lost.wait(60)
        with somebody.connection.cursor() as cursor:
            cursor.execute("ROLLBACK")


def end_sessions(somebody):
    somebody.ask(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE query LIKE '%%django_pglock_lease%%' AND pid <> pg_backend_pid()"
    )


def test_a_lease_is_kept_when_its_session_is_ended(somebody):
    with Lease("a", ttl=6) as lease:
        first = Row.objects.get()
        while now() < first.expires_at:
            end_sessions(somebody)
            time.sleep(1)
        lease.assert_held()
    assert not lease.lost.is_set()


def test_a_leader_steps_down_when_the_first_renewal_fails(somebody):
    """This is long before the lease expires. At its expiry, the reason would contain "six seconds"."""
    with pytest.raises(LockLost, match=r"could not be renewed \("), leader("a", ttl=6) as leadership:
        with somebody.connection.cursor() as cursor:
            cursor.execute("BEGIN; SELECT 1 FROM django_pglock_lease FOR UPDATE")
        assert leadership.lost.wait(60)
        with somebody.connection.cursor() as cursor:
            cursor.execute("ROLLBACK")


def test_the_bodys_own_exception_is_kept_when_the_lease_cannot_be_given_back(monkeypatch, caplog):
    monkeypatch.setattr(lease_thread, "RELEASE_RETRY_DELAYS", ())
    monkeypatch.setattr(lease_thread, "RELEASE", "SELECT 1 / 0")

    async def main():
        with pytest.raises(ZeroDivisionError, match="mine"):
            async with Lease("b"):
                raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"), Lease("a"):
        raise ZeroDivisionError("mine")
    asyncio.run(main())
    assert caplog.text.count("could not be released (division by zero)") == 2
    with pytest.raises(LockError, match="could not be released"), Lease("c"):
        pass


def test_the_time_in_which_the_machine_is_suspended_counts_for_the_expiry(monkeypatch):
    with pytest.raises(LockLost), Lease("a", ttl=30) as lease:
        before = lease_thread.boottime
        monkeypatch.setattr(lease_thread, "boottime", lambda: before() + 31)
        assert not lease
        with pytest.raises(LockLost):
            lease.assert_held()
        monkeypatch.undo()
        lease._holder._lose("test")
    if hasattr(time, "CLOCK_BOOTTIME"):
        monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: 5.0}.__getitem__)
        assert lease_thread.boottime() == 5.0
