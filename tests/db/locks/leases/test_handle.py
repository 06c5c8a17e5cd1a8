"""Handles of leases without a reference: cancelled, dropped, abandoned."""

from __future__ import annotations

import asyncio

import pytest

from django_pglock import Lease, leader
from django_pglock.models import Lease as Row
from tests.db.locks.sessions import sessions_of_leases

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_cancelled_candidate_leaves_no_lease(eventually):
    async def main():
        async with Lease("a", ttl=30):
            waiting = asyncio.create_task(leader("a").aacquire())
            await asyncio.sleep(0.1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        for number in range(20):
            taking = asyncio.create_task(Lease("hot").aacquire())
            await asyncio.sleep(number * 0.0003)
            if not taking.cancel():
                await (await taking).release()
            await asyncio.gather(taking, return_exceptions=True)

    asyncio.run(main())
    eventually(lambda: not Row.objects.held().exists(), why="a mutex nobody knows of is held forever")
    eventually(lambda: sessions_of_leases() == 0)


def test_a_lease_whose_handle_is_dropped_is_given_back(caplog, eventually):
    Lease("a", ttl=60).acquire()
    eventually(lambda: not Row.objects.held().exists())
    assert "Lease 'a' was released because its handle was deleted" in caplog.text


def test_a_release_that_is_cancelled_is_repeated_without_the_warning_of_a_dropped_handle(caplog, eventually):
    async def main():
        for number in range(20):
            lease = await Lease(f"a{number}").aacquire()
            releasing = asyncio.ensure_future(lease.release())
            await asyncio.sleep(number * 0.0001)
            releasing.cancel()
            await asyncio.gather(releasing, return_exceptions=True)
            assert not lease.is_open

    asyncio.run(main())
    eventually(lambda: not Row.objects.held().exists())
    assert "deleted" not in caplog.text
