"""Locks of coroutines: real exclusion inside one process, nothing left after a cancel, a loop that never blocks."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from django.core.exceptions import SynchronousOnlyOperation
from django.db import OperationalError

from django_pglock import Lease, LockError, LockLost, LockNotAvailable, leader, lock, lock_all, semaphore, try_lock
from django_pglock.keys import make_key
from django_pglock.models import AdvisoryLock
from tests.concurrency.locks.sessions import _closing, _is, arows, asks, in_a_task, rows, some_wait, until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("scope", ["session", "transaction"])
def test_coroutines_of_one_process_exclude_each_other(scope):
    """If they shared Django's connection, PostgreSQL would regard them as one holder and grant all of them."""
    inside, most = 0, 0
    shared = lock("report", scope=scope)

    async def visit():
        nonlocal inside, most
        async with shared as handle:
            assert handle.scope == scope
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.001)
            inside -= 1

    async def main():
        await asyncio.gather(*[visit() for _ in range(40)])
        assert (await arows()) == (0, 0)

    asyncio.run(main())
    assert most == 1


def test_a_coroutine_function_is_decorated_and_stays_one(somebody):
    @lock("sync:{shop_id}", timeout=0, on_busy="skip")
    async def sync(shop_id):
        await asyncio.sleep(0)
        return not await asyncio.to_thread(somebody.can_have, f"sync:{shop_id}")

    assert asyncio.iscoroutinefunction(sync)
    assert asyncio.run(sync(5)) is True
    somebody.holds("sync:6")
    assert asyncio.run(sync(shop_id=6)) is None


@pytest.mark.parametrize("timeout", [0, 0.05])
@pytest.mark.parametrize("scope", ["session", "transaction"])
def test_coroutines_get_lock_not_available_for_a_busy_lock(somebody, timeout, scope):
    somebody.holds("a")

    async def main():
        with pytest.raises(LockNotAvailable) as caught:
            async with lock("a", timeout=timeout, scope=scope):
                pytest.fail("the body ran without the lock")
        assert caught.value.name == "a"
        async with try_lock("a", timeout=timeout, scope=scope) as held:
            assert not held
        async with lock("outer", scope=scope):
            with pytest.raises(LockNotAvailable):
                async with lock("a", timeout=timeout, scope=scope):
                    pass
            async with lock("inner", scope=scope, timeout=1):
                held = await asyncio.to_thread(_closing, lambda: {row.key for row in AdvisoryLock.objects.held()})
                assert {make_key("outer").number, make_key("inner").number} <= held
        assert (await arows()) == (1, 0)

    asyncio.run(main())


def test_coroutines_can_use_each_kind_of_lock(somebody):
    async def main():
        async with lock_all("a", "b", timeout=1) as handle, semaphore("s", limit=2) as slot, lock("c", shared=True):
            assert len(handle.keys) == 2
            assert slot.name == "s"
            assert not any(
                [await asyncio.to_thread(somebody.can_have, name) for name in ("a", "b", "c", "s#1", "s#2")][:3]
            )
        handle = await lock("d").aacquire()
        handle.assert_held()
        assert handle.token is None
        await handle.release()
        with pytest.raises(LockError, match="not held"):
            await handle.release()
        with pytest.raises(LockLost, match="Lock 'd' is not held: it was released"):
            handle.assert_held()
        assert (await arows()) == (0, 0)

    asyncio.run(main())


def test_the_same_coroutine_may_take_it_again_and_its_children_may_not():
    async def child():
        async with try_lock("a") as held:
            return bool(held)

    async def main():
        async with lock("a"):
            async with lock("a", timeout=0):
                assert await asyncio.create_task(child()) is False
            assert await asyncio.create_task(child()) is False
            with pytest.raises(LockError, match="already"):
                async with lock("a", reentrant=False):
                    pass
        assert await asyncio.create_task(child()) is True

    asyncio.run(main())


@pytest.mark.parametrize("scope", ["session", "transaction"])
def test_a_cancelled_waiter_leaves_neither_lock_nor_waiter(somebody, scope):
    somebody.holds("a")

    async def wait():
        async with lock("a", scope=scope):
            pytest.fail("the body ran without the lock")

    async def main():
        waiting = [asyncio.create_task(wait()) for _ in range(3)]
        await until(lambda: asks("a"), "nobody asks")
        for task in waiting:
            task.cancel()
        for task in waiting:
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: _is(arows, (1, 0)), "a waiter was left")
        async with lock("b", scope=scope):
            pass

    asyncio.run(main())


def test_an_inner_wait_that_is_cut_short_does_not_cost_the_outer_lock(somebody):
    """Users write ``asyncio.timeout`` around an inner lock. The outer lock must still be held."""
    somebody.holds("inner")

    async def wait():
        async with lock("outer") as outer:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(lock("other session").aacquire(), 0)
            task = asyncio.current_task()
            asyncio.get_running_loop().call_later(0.1, task.cancel)
            with pytest.raises(asyncio.CancelledError):
                async with lock("inner"):
                    pass
            if hasattr(task, "uncancel"):
                task.uncancel()
            outer.assert_held()
            assert not await asyncio.to_thread(somebody.can_have, "outer")

    asyncio.run(wait())
    assert rows() == (1, 0)


@pytest.mark.parametrize("shared", [False, True])
def test_coroutines_cancelled_at_any_moment_leave_no_lock(shared):
    """The cancel comes before the statement arrives, while it runs, after its answer was sent, and at release.

    If the lock is shared, another coroutine has it all the time and keeps it.
    """

    async def visit(pause):
        async with lock("hot", shared=shared):
            await asyncio.sleep(pause)

    async def main():
        other = await in_a_task(lock("hot", shared=True)) if shared else None
        for number in range(60):
            tasks = [asyncio.create_task(visit(0.0005)) for _ in range(3)]
            await asyncio.sleep(number * 0.0001)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if other is not None:
            other.assert_held()
            await other.release()
        await until(lambda: _is(arows, (0, 0)), "something was left")

    asyncio.run(main())


@pytest.mark.parametrize("what", [lock("a"), lock_all("a", "b"), semaphore("a", limit=2), Lease("a"), leader("a")])
def test_locks_for_threads_are_refused_in_a_coroutine_with_what_to_write(what):
    async def main():
        with pytest.raises(SynchronousOnlyOperation, match="async with"), what:
            pass

    asyncio.run(main())


def test_the_event_loop_runs_while_a_coroutine_waits(somebody):
    somebody.holds("a")

    async def main():
        waiting = asyncio.create_task(lock("a").aacquire())
        # If the event loop waited as well, it could neither notice that nor release the lock.
        await until(lambda: asks("a"), "nobody asks")
        assert not waiting.done()
        await asyncio.to_thread(somebody.ask, "SELECT pg_advisory_unlock_all()")
        await (await waiting).release()

    asyncio.run(main())


def test_a_session_that_was_ended_is_noticed(somebody):
    async def main():
        with pytest.raises(LockLost):
            async with lock("a") as handle:
                pid = await asyncio.to_thread(_closing, lambda: AdvisoryLock.objects.for_name("a").get().pid)
                await asyncio.to_thread(somebody.ends_session, pid)
                with pytest.raises(LockLost):
                    while True:
                        handle.assert_held()
                        await asyncio.sleep(0.01)
        with pytest.raises(ZeroDivisionError):
            async with lock("a") as handle:
                pid = await asyncio.to_thread(_closing, lambda: AdvisoryLock.objects.for_name("a").get().pid)
                await asyncio.to_thread(somebody.ends_session, pid)
                1 / 0  # noqa: B018
        async with lock("a"):
            pass

    asyncio.run(main())


def test_other_database_errors_pass_through(somebody):
    """Also as Django's, as everywhere in a Django project."""
    somebody.holds("a")

    async def main():
        async with lock("outer"):
            waiting = asyncio.create_task(lock("a", scope="transaction").aacquire())
            await until(some_wait, "nobody waits")
            pid = await asyncio.to_thread(
                somebody.ask, "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            )
            await asyncio.to_thread(somebody.ask, "SELECT pg_cancel_backend(%s)", pid)
            with pytest.raises(OperationalError, match="user request"):
                await waiting
        assert (await arows()) == (1, 0)

    asyncio.run(main())


# Left behind


def test_a_handle_that_is_dropped_frees_its_lock(somebody, caplog):
    async def main():
        await asyncio.create_task(_drop("a"))
        assert await asyncio.to_thread(somebody.can_have, "a")

    asyncio.run(main())
    assert "'a' was released because its handle was deleted" in caplog.text


async def _drop(name):
    await lock(name).aacquire()


@pytest.mark.parametrize("shared_lockable", [False, True])
def test_an_abandoned_asynchronous_generator_frees_its_lock(somebody, shared_lockable):
    """Python closes the generator in another task, some time later."""
    one = lock("a")

    async def numbers():
        async with one if shared_lockable else lock("a"):
            yield 1
            yield 2

    async def take_one():
        async for number in numbers():
            return number

    async def main():
        assert await asyncio.create_task(take_one()) == 1
        await until(lambda: asyncio.to_thread(somebody.can_have, "a"), "the lock is held forever")

    asyncio.run(main())


def test_a_handle_is_given_back_from_another_task_while_its_own_one_waits(somebody):
    somebody.holds("b")
    box = []

    async def owner():
        box.append(await lock("a").aacquire())
        async with lock("b"):
            pass

    async def main():
        task = asyncio.create_task(owner())
        await until(lambda: asks("b"), "nobody asks")
        await asyncio.wait_for(box.pop().release(), 60)
        await asyncio.to_thread(somebody.ask, "SELECT pg_advisory_unlock_all()")
        await task
        await until(lambda: _is(arows, (0, 0)), "it is held yet")

    asyncio.run(main())
