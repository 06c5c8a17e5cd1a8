"""How coroutines share a session for their locks: queues in the process, one message for all, the end of the loop."""

from __future__ import annotations

import asyncio
import time

import pytest
from django.db import OperationalError, connection
from psycopg.errors import DeadlockDetected

from django_pglock import LockError, LockLost, LockNotAvailable, lock, lock_all, semaphore
from django_pglock.locks.coroutine_sessions import MOST_IDLE
from django_pglock.models import AdvisoryLock
from django_pglock.postgres.sessions import AsyncSession
from tests.concurrency.locks.sessions import (
    _closing,
    _is,
    arows,
    asessions_of_locks,
    asks,
    in_a_task,
    lock_sessions,
    rows,
    until,
)
from tests.conftest import NEVER

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("timeout", [0, 5, None])
def test_all_locks_of_an_event_loop_are_in_one_session(timeout, somebody):
    """Ten slow streams must not block all other locked views."""

    async def main():
        held = await asyncio.gather(*[in_a_task(lock("async", number, timeout=timeout)) for number in range(40)])
        assert all(held)
        assert await asessions_of_locks() == 1
        assert await arows() == (40, 0)
        for number in range(0, 40, 10):
            assert not await asyncio.to_thread(somebody.can_have, f"async:{number}")
            with pytest.raises(LockNotAvailable):
                await in_a_task(lock("async", number, timeout=0))
        for handle in held:
            await handle.release()
        assert await arows() == (0, 0)

    asyncio.run(main())


def test_modes_slots_and_reentry_in_one_session(somebody):
    async def reenter():
        async with lock("c"), lock("c", timeout=0):
            with pytest.raises(LockError, match="already"):
                await lock("c", reentrant=False).aacquire()
            with pytest.raises(LockError, match="already"):
                await lock("c", scope="transaction", timeout=5).aacquire()
        return await asyncio.to_thread(somebody.can_have, "c")

    async def all_slots():
        async with semaphore("own", limit=2) as one, semaphore("own", limit=2) as two:
            assert one.key != two.key
            with pytest.raises(LockError, match="already holds all slots"):
                await semaphore("own", limit=2).aacquire()

    async def main():
        readers = [await in_a_task(lock("a", shared=True)) for _ in range(3)]
        with pytest.raises(LockNotAvailable):
            await in_a_task(lock("a", timeout=0.05))
        await readers.pop().release()
        assert not await asyncio.to_thread(somebody.can_have, "a"), "the others read on"
        slots = [await in_a_task(semaphore("s", limit=2, timeout=0)) for _ in range(2)]
        assert slots[0].key != slots[1].key
        with pytest.raises(LockNotAvailable):
            await in_a_task(semaphore("s", limit=2, timeout=0.05))
        waiting = asyncio.create_task(semaphore("s", limit=2).aacquire())
        await slots.pop().release()
        slots.append(await waiting)
        all_of_them = await in_a_task(lock_all("x", "y", timeout=1))
        with pytest.raises(LockNotAvailable):
            await in_a_task(lock_all("y", "z", timeout=0))
        assert await asyncio.to_thread(somebody.can_have, "z")
        assert await asyncio.create_task(reenter())
        await asyncio.create_task(all_slots())
        for handle in (*readers, *slots, all_of_them):
            await handle.release()
        assert await arows() == (0, 0)

    asyncio.run(main())


@pytest.mark.parametrize("options", [{"scope": "transaction"}, {"max_hold": 60}])
def test_a_lock_that_cannot_share_a_session_gets_another_session(options):
    async def again():
        nested = lock("again", **options), lock_all("again", "more", **options), lock("other", **options)
        async with lock("again", **options), nested[0], nested[1], nested[2]:
            # It would wait for itself: the two are in different sessions.
            with pytest.raises(LockError, match="already held by this coroutine"):
                await lock_all("again", "other", **options).aacquire()

    async def main():
        async with lock("shared"):
            held = [await in_a_task(lock("a", number, timeout=0, **options)) for number in range(3)]
            await asyncio.create_task(again())
            assert await arows() == (4, 0)
            for handle in held:
                await handle.release()
        assert await arows() == (0, 0)

    asyncio.run(main())


def test_coroutines_get_a_lock_in_the_order_of_their_arrival():
    served = []

    async def visit(number):
        async with lock("a"):
            served.append(number)

    async def main():
        async with lock("a"):
            waiting = []
            for number in range(5):
                waiting.append(asyncio.create_task(visit(number)))
                await asyncio.sleep(0)
            waiting[2].cancel()
            with pytest.raises(LockNotAvailable):
                await in_a_task(lock("a", shared=True, timeout=0))
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(main())
    assert served == [0, 1, 3, 4]


def test_a_shared_lock_waits_behind_another_session_that_wants_it_alone():
    """PostgreSQL grants their session again what it has. So coroutines that share a lock could keep it without end."""

    async def main():
        first = await in_a_task(lock("a", shared=True))
        alone = asyncio.create_task(asyncio.to_thread(take_alone))
        while (await arows())[1] == 0:
            await asyncio.sleep(0.01)
        with pytest.raises(LockNotAvailable):
            await in_a_task(lock("a", shared=True, timeout=0))
        with pytest.raises(LockNotAvailable):
            await in_a_task(lock_all("a", "b", shared=True, timeout=0.05))
        second = asyncio.create_task(in_a_task(lock("a", shared=True)))
        await first.release()
        await alone
        await (await second).release()

    def take_alone():
        with lock("a", timeout=NEVER):
            pass
        connection.close()

    asyncio.run(main())


@pytest.mark.parametrize("shared", [False, True])
def test_a_deadlock_of_coroutines_is_an_error_as_in_the_server(shared):
    """PostgreSQL cannot see it: the coroutines wait for each other in the process."""
    names = ("a", "a") if shared else ("a", "b")

    async def visit(first, second, has_first, other_has_first):
        async with lock(first, shared=shared):
            has_first.set()
            await other_has_first.wait()
            async with lock(second):
                return "both"

    async def main():
        one, two = asyncio.Event(), asyncio.Event()
        ends = await asyncio.gather(visit(*names, one, two), visit(*names[::-1], two, one), return_exceptions=True)
        [failed] = [end for end in ends if end != "both"]
        assert isinstance(failed, OperationalError)
        assert isinstance(failed.__cause__, DeadlockDetected)
        assert await arows() == (0, 0)

    asyncio.run(main())


def test_the_end_of_the_session_is_noticed_by_each_of_its_locks(somebody):
    async def main():
        handles = [await in_a_task(lock("a", number)) for number in range(3)]
        [pid] = await asyncio.to_thread(_closing, lambda: set(AdvisoryLock.objects.values_list("pid", flat=True)))
        await asyncio.to_thread(somebody.ends_session, pid)
        for handle in handles:
            with pytest.raises(LockLost):
                await handle.release()
        async with lock("a", 0):
            assert await arows() == (1, 0)

    asyncio.run(main())


def test_a_lock_of_another_session_is_polled(somebody):
    somebody.holds("a")

    async def main():
        waiting = [asyncio.create_task(lock("a").aacquire()) for _ in range(3)]
        await until(lambda: asks("a"), "nobody asks")
        await asyncio.to_thread(somebody.leaves)
        for task in waiting:
            await (await task).release()

    asyncio.run(main())


def test_a_lock_that_others_want_all_the_time_is_waited_for_in_the_server(somebody):
    """A poll never comes before those that wait in the server."""
    for number in range(6):
        somebody.holds(f"a:{number}")

    async def hold(number):
        async with lock("a", number) as handle, lock("a", number):
            handle.assert_held()

    async def main():
        async with lock("shared"):
            waiting = [asyncio.create_task(hold(number)) for number in range(6)]
            await until(lambda: _is(arows, (7, MOST_IDLE)), "others than a few wait in the server")
            await asyncio.to_thread(somebody.leaves)
            await asyncio.gather(*waiting)
            assert await arows() == (1, 0)

    asyncio.run(main())


def test_the_session_ends_with_the_loop():
    async def visit(number):
        async with lock("async", number):
            await asyncio.sleep(0.001)

    async def main():
        await asyncio.gather(*[visit(number) for number in range(20)])
        await lock("kept").aacquire()

    asyncio.run(main())
    deadline = time.monotonic() + 60
    while lock_sessions() or rows() != (0, 0):
        assert time.monotonic() < deadline, "the loop ended, its sessions did not"
        time.sleep(0.01)


def test_an_answer_that_cannot_be_read_ends_the_session_and_reaches_each_coroutine(monkeypatch):
    """Otherwise they would never return. Code that watches statements may read the row of the answer."""

    async def send(self, statements):
        row = await sent(self, statements)
        return None if "pg_try" in statements else row

    async def main():
        async with lock("before") as before:
            monkeypatch.setattr(AsyncSession, "send", send)
            ends = await asyncio.gather(*[in_a_task(lock("a", number)) for number in range(3)], return_exceptions=True)
            assert [type(end) for end in ends] == [ValueError] * 3
            monkeypatch.undo()
            with pytest.raises(LockLost):
                before.assert_held()
            async with lock("after"):
                await until(lambda: _is(arows, (1, 0)), "the session is kept")

    sent = AsyncSession.send
    with pytest.raises(LockLost):
        asyncio.run(main())
