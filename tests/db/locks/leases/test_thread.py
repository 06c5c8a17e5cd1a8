"""The thread of the leases: its statements and its database sessions."""

from __future__ import annotations

import asyncio

import pytest
from django.db import DatabaseError

from django_pglock import Lease
from django_pglock.locks import lease_thread

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_lease_is_released_if_the_answer_to_its_statement_is_lost(somebody, monkeypatch):
    """A lease without a ttl whose statement was executed and whose answer was lost would be held forever."""
    ask = lease_thread.LeaseThread.execute

    async def cut(self, alias, statement, params, **options):
        row = await ask(self, alias, statement, params, **options)
        if "INSERT" in statement:
            raise DatabaseError("the connection was cut")
        return row

    monkeypatch.setattr(lease_thread.LeaseThread, "execute", cut)
    with pytest.raises(DatabaseError, match="cut"), Lease("a"):
        pass
    monkeypatch.undo()
    with Lease("a") as lease:
        assert lease.token == 2


def test_many_leases_of_one_process_share_few_sessions(somebody):
    """All at once: each would begin to open a session of its own."""
    somebody.ask("SELECT 1")
    raw = somebody.connection.connection
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%django_pglock_lease%'"

    async def hold(number, everybody):
        async with Lease("many", number, ttl=600) as lease:
            await everybody.arrive()
            return lease.token

    async def hold_all():
        everybody = Gathering(500)
        holding = [asyncio.ensure_future(hold(number, everybody)) for number in range(500)]
        await everybody.complete.wait()
        [count] = raw.execute(sessions).fetchone()
        everybody.over.set()
        return count, await asyncio.gather(*holding)

    count, tokens = asyncio.run(hold_all())
    assert tokens == [1] * 500
    assert count <= lease_thread.SESSIONS + 1, "and the one that asks"


class Gathering:
    """Where coroutines wait until all have arrived, and until it is over."""

    def __init__(self, number):
        self.missing, self.complete, self.over = number, asyncio.Event(), asyncio.Event()

    async def arrive(self):
        self.missing -= 1
        if not self.missing:
            self.complete.set()
        await self.over.wait()
