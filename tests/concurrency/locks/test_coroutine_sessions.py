"""Sessions of coroutines' locks: shared where there are more locks than sessions, and ended with the event loop."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import patch

import pytest

from django_pglock import LockError, LockNotAvailable, lock, lock_all, semaphore
from django_pglock.locks import coroutine_sessions
from tests.concurrency.locks.sessions import (
    _is,
    arows,
    asessions_of_locks,
    in_a_task,
    lock_sessions,
    rows,
    until,
)

pytestmark = pytest.mark.django_db(transaction=True)


@patch.object(coroutine_sessions, "OWN_SESSIONS", 2)
@pytest.mark.parametrize("timeout", [0, 5, None])
def test_many_lock_holders_neither_fail_nor_wait_for_sessions(timeout, somebody):
    """Ten slow streams must not block all other locked views."""

    async def main():
        held = [await in_a_task(lock("async", number, timeout=timeout)) for number in range(12)]
        assert all(held)
        assert await asessions_of_locks() <= 3
        assert await arows() == (12, 0)
        for number in range(12):
            assert not await asyncio.to_thread(somebody.can_have, f"async:{number}")
            with pytest.raises(LockNotAvailable):
                await in_a_task(lock("async", number, timeout=0))
        for handle in held:
            await handle.release()
        assert await arows() == (0, 0)

    asyncio.run(main())


@patch.object(coroutine_sessions, "OWN_SESSIONS", 1)
def test_coroutines_that_share_a_session_exclude_each_other():
    """PostgreSQL regards them as one holder."""
    inside = {"a": 0, "b": 0}

    async def visit(number):
        name = "ab"[number % 2]
        async with lock(name):
            inside[name] += 1
            assert inside[name] == 1
            await asyncio.sleep(0.002)
            inside[name] -= 1

    async def main():
        keeper = await in_a_task(lock("keeper"))
        await asyncio.gather(*[visit(number) for number in range(20)])
        await keeper.release()

    asyncio.run(main())


@patch.object(coroutine_sessions, "OWN_SESSIONS", 1)
def test_modes_slots_and_reentry_in_a_shared_session(somebody):
    async def reenter():
        async with lock("c"), lock("c", timeout=0):
            with pytest.raises(LockError, match="already"):
                await lock("c", reentrant=False).aacquire()
        return await asyncio.to_thread(somebody.can_have, "c")

    async def main():
        keeper = await in_a_task(lock("keeper"))
        readers = [await in_a_task(lock("a", shared=True)) for _ in range(3)]
        with pytest.raises(LockNotAvailable):
            await in_a_task(lock("a", timeout=0.05))
        await readers.pop().release()
        assert not await asyncio.to_thread(somebody.can_have, "a"), "the others read on"
        slots = [await in_a_task(semaphore("s", limit=2, timeout=0)) for _ in range(2)]
        assert slots[0].key != slots[1].key
        with pytest.raises(LockNotAvailable):
            await in_a_task(semaphore("s", limit=2, timeout=0.05))
        all_of_them = await in_a_task(lock_all("x", "y", timeout=1))
        with pytest.raises(LockNotAvailable):
            await in_a_task(lock_all("y", "z", timeout=0))
        assert await asyncio.to_thread(somebody.can_have, "z")
        assert await asyncio.create_task(reenter())
        for handle in (keeper, *readers, *slots, all_of_them):
            await handle.release()
        assert await arows() == (0, 0)

    asyncio.run(main())


@patch.object(coroutine_sessions, "OWN_SESSIONS", 1)
@pytest.mark.parametrize("options", [{"scope": "transaction"}, {"max_hold": 60}])
def test_a_lock_that_cannot_share_a_session_gets_another_session(options):
    async def main():
        keeper = await in_a_task(lock("keeper"))
        held = [await in_a_task(lock("a", number, timeout=0, **options)) for number in range(3)]
        for handle in (keeper, *held):
            await handle.release()
        assert await arows() == (0, 0)

    asyncio.run(main())


@patch.object(coroutine_sessions, "OWN_SESSIONS", 1)
def test_a_cancel_in_a_shared_session_loses_no_lock_of_others():
    async def visit(name):
        async with lock(name, shared=True):
            await asyncio.sleep(0.0005)

    async def main():
        keeper = await in_a_task(lock("keeper"))
        other = await in_a_task(lock("other", shared=True))
        for number in range(60):
            tasks = [asyncio.create_task(visit("other")) for _ in range(3)]
            await asyncio.sleep(number * 0.0001)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        other.assert_held()
        await other.release()
        await keeper.release()
        await until(lambda: _is(arows, (0, 0)), "something was left")

    asyncio.run(main())


@patch.object(coroutine_sessions, "OWN_SESSIONS", 1)
def test_a_coroutine_with_locks_in_two_sessions_does_not_wait_for_itself():
    async def visit(keeper):
        async with lock("a"):
            await keeper.release()
            async with lock("b"), lock("a", timeout=5):
                with pytest.raises(LockError, match="already"):
                    await lock("a", reentrant=False).aacquire()
                with pytest.raises(LockError, match="already"):
                    await lock("a", scope="transaction", timeout=5).aacquire()

    async def main():
        await asyncio.create_task(visit(await in_a_task(lock("keeper"))))
        assert await arows() == (0, 0)

    asyncio.run(main())


@patch.object(coroutine_sessions, "OWN_SESSIONS", 2)
def test_sessions_are_few_are_used_again_and_end_with_the_loop():
    async def visit(number):
        async with lock("async", number):
            await asyncio.sleep(0.001)

    async def main():
        await asyncio.gather(*[visit(number) for number in range(20)])
        assert await asessions_of_locks() <= 3

    asyncio.run(main())
    deadline = time.monotonic() + 60
    while lock_sessions() or rows() != (0, 0):
        assert time.monotonic() < deadline, "the loop ended, its sessions did not"
        time.sleep(0.01)
