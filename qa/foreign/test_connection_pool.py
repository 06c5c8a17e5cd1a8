"""django-db-connection-pool lends sessions of SQLAlchemy's pool.

Django gets an object of SQLAlchemy's own class. Its ``close()`` returns the session to the pool and forgets it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection, transaction

from django_pglock import Lease, LockLost, LockNotAvailable, lock
from django_pglock.testing import assert_no_locks, hold
from qa.foreign.sample.models import Letter
from qa.foreign.sample.tasks import nothing


@pytest.mark.parametrize("attempt", range(4))
def test_a_session_with_a_lock_does_not_return_to_the_pool(attempt: int) -> None:
    with pytest.raises(LockLost), lock("a"):
        connection.close()
    with lock("a", timeout=1) as handle:
        handle.assert_held()
    connection.close()
    assert_no_locks()


def test_locks_exclude_and_end_with_their_block_or_transaction() -> None:
    with hold("a"), pytest.raises(LockNotAvailable), lock("a", timeout=0.1):
        pass
    with transaction.atomic(), lock("a", timeout=1) as handle:
        Letter.objects.count()
    assert not handle
    assert_no_locks()


def test_coroutines_and_leases_use_sessions_of_the_pool() -> None:
    async def hold_some() -> None:
        async def one(number: int) -> None:
            async with lock("async", number, timeout=30):
                await asyncio.sleep(0.01)

        await asyncio.gather(*[one(number) for number in range(8)])

    for _ in range(2):
        asyncio.run(hold_some())
    with Lease("a", ttl=30), Lease("b", ttl=30), Lease("c", ttl=30), Lease("d", ttl=30):
        assert Letter.objects.count() == 0
    assert_no_locks()


def test_a_worker_runs_tasks(drain: Callable[..., Any]) -> None:
    results = [nothing.enqueue() for _ in range(5)]
    drain()
    for result in results:
        result.refresh()
        assert result.is_finished
