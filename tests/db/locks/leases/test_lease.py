"""Leases: an owner, an end, and a token that only grows."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.test import TestCase
from django.test.utils import CaptureQueriesContext

from django_pglock import Lease, LockError, LockKeyError, LockLost, LockNotAvailable, leader
from django_pglock.models import Lease as Row
from tests.db.locks.sessions import Somebody
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("ttl", [None, 60, timedelta(minutes=1)])
def test_one_holder_at_a_time_and_a_token_that_grows(ttl):
    with Lease("nightly", 5, ttl=ttl) as lease:
        assert (lease.name, lease.token, bool(lease)) == ("nightly:5", 1, True)
        lease.assert_held()
        with pytest.raises(LockNotAvailable) as caught, Lease("nightly", 5, ttl=ttl):
            pytest.fail("two at once")
        [holder] = caught.value.holders()
        assert (holder.name, holder.owner, holder.token) == ("nightly:5", lease.owner, 1)
        assert (holder.expires_at is None) == (ttl is None)
    assert not lease
    with Lease("nightly", 5, ttl=ttl) as lease:
        assert lease.token == 2
    assert Row.objects.held().count() == 0
    with pytest.raises(LockError, match="not held"):
        lease.release()


def test_taking_a_lease_is_not_rolled_back_with_the_transaction_of_the_caller():
    """If the lease were rolled back with the transaction, another holder would get the same token."""
    with pytest.raises(ZeroDivisionError), transaction.atomic(), Lease("a", ttl=5):
        1 / 0  # noqa: B018
    with transaction.atomic(), CaptureQueriesContext(connection) as queries, Lease("a", ttl=5) as lease:
        assert lease.token == 2
    assert len(queries) == 0


class InsideTestCase(TestCase):
    def test_a_lease_works_inside_a_django_test_case(self):
        with Lease("in a test case", ttl=5), self.assertRaises(LockNotAvailable), Lease("in a test case"):
            pass
        # By another session: the row was not written in the transaction of this test, so the rollback would not remove
        # it.
        other = Somebody()
        with other.connection.cursor() as cursor:
            cursor.execute("DELETE FROM django_pglock_lease")
        other.leaves()


def test_a_function_decorated_with_a_lease_runs_or_is_skipped_if_busy():
    @Lease("report:{name}", ttl=5, on_busy="skip")
    def report(name):
        return Row.objects.get(name=f"report:{name}").token

    assert [report("x"), report("x"), report("y")] == [1, 2, 1]
    with Lease("report:x"):
        assert report("x") is None


@pytest.mark.parametrize("ttl", [0, -1, 0.1, "1", True])
def test_an_invalid_ttl_of_a_lease_is_refused(ttl):
    with pytest.raises(ValueError, match="ttl"):
        Lease("a", ttl=ttl)
    with pytest.raises(ValueError, match="needs a ttl"):
        leader("a", ttl=None)


@pytest.mark.parametrize("name", [None, "", 1.5])
def test_an_invalid_name_of_a_lease_is_refused(name):
    with pytest.raises(LockKeyError):
        Lease(name)


@pytest.mark.parametrize("name", ["quote ' and %s %(key)s", "*/; --", "x" * 10_000, 5, "\u202e"])
def test_a_lease_name_may_contain_any_text(name):
    with Lease(name, ttl=5), pytest.raises(LockNotAvailable), Lease(name):
        pass


def test_a_guarded_update_with_the_token_refuses_late_writes_of_a_former_holder():
    """The pattern of the documentation: an update with a smaller token than that of the row changes nothing."""
    Effect.objects.create(name="report", number=0)

    def write(token):
        return Effect.objects.filter(name="report", number__lte=token).update(number=token, name="report")

    with pytest.raises(LockLost), Lease("report", ttl=60) as old:
        Row.objects.all().free()  # the same as the expiry of the lease of a stopped holder
        with Lease("report", ttl=60) as new:
            assert write(new.token) == 1
            assert write(old.token) == 0, "the late one is refused"


def test_coroutines_hold_leases_too():
    async def compete(inside):
        async with Lease("a", ttl=30, timeout=60) as lease:
            inside.append(1)
            assert len(inside) == 1
            await asyncio.sleep(0.001)
            inside.pop()
            return lease.token

    async def main():
        inside = []
        tokens = await asyncio.gather(*[compete(inside) for _ in range(8)])
        assert sorted(tokens) == list(range(1, 9))
        async with leader("b") as leadership:
            await leadership.extend(30)
            with pytest.raises(LockNotAvailable):
                async with Lease("b"):
                    pass
        waiting = asyncio.create_task(leadership.until_lost())
        await asyncio.wait_for(waiting, 60)
        assert await Lease("c", ttl=5)(_token)() is None

    async def _token():
        return None

    asyncio.run(main())
    assert Row.objects.held().count() == 0
