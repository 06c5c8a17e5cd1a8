"""Locks of coroutines behind a pooler that has fewer sessions than the event loop may open."""

from __future__ import annotations

import asyncio

import pytest
from django.db import OperationalError, connection

from django_pglock import lock
from django_pglock.locks import coroutine_sessions
from django_pglock.testing import assert_no_locks
from tests.conftest import NEVER
from tests.pgbouncer import PROGRAM, PgBouncer, way_to_server

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.skipif(PROGRAM is None, reason="no PgBouncer on this machine: apt-get install pgbouncer"),
]


@pytest.fixture
def pooled(alias, request):
    """An alias that leads to four sessions of the server, each for one client until it disconnects."""
    connection.ensure_connection()
    with PgBouncer({"four": f"{way_to_server(connection.connection.info)} pool_size=4"}, mode="session") as pgbouncer:
        yield alias(f"four_{abs(hash(request.node.name))}", NAME="four", HOST=str(pgbouncer.folder), PORT="")
    assert_no_locks()


def run_six(pooled, visit, **options):
    """Run six coroutines, each with a lock of its own, and return what they return or raise."""

    async def take(number):
        async with lock("a", number, using=pooled, **options):
            return await visit(number)

    async def main():
        six = [asyncio.create_task(take(number)) for number in range(6)]
        _, left = await asyncio.wait(six, timeout=NEVER)
        for each in left:
            each.cancel()
        assert not left, f"{len(left)} coroutines wait for a session"
        return await asyncio.gather(*six, return_exceptions=True)

    return asyncio.run(main())


@pytest.mark.parametrize("options", [{}, {"scope": "transaction"}, {"max_hold": 60}], ids=str)
def test_a_session_that_is_given_back_goes_to_a_coroutine_that_waits_for_one(pooled, monkeypatch, options):
    """It must not stay unused while a coroutine waits in the queue of the pooler."""
    monkeypatch.setattr(coroutine_sessions, "OPEN_WITHIN", 10 * NEVER)

    async def visit(number):
        await asyncio.sleep(0.02)
        return number

    assert run_six(pooled, visit, **options) == list(range(6))


def test_a_lock_that_gets_no_session_raises_an_error_that_names_the_limit(pooled, monkeypatch):
    """The other four never end before."""
    monkeypatch.setattr(coroutine_sessions, "OPEN_WITHIN", 0.5)
    inside, refused = [], asyncio.Event()

    async def main():
        async def take(number):
            try:
                async with lock("a", number, using=pooled, scope="transaction"):
                    inside.append(number)
                    await refused.wait()
            except OperationalError as error:
                refused.set()
                return str(error)

        return await asyncio.wait_for(asyncio.gather(*map(take, range(6))), NEVER)

    errors = [each for each in asyncio.run(main()) if each is not None]
    assert len(inside) >= 4
    assert errors
    assert all("sessions for locks" in each and repr(pooled) in each for each in errors)
