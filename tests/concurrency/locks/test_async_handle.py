"""Locks of coroutines: real exclusion inside one process, nothing left after a cancel, a loop that never blocks."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import suppress

import pytest
from django.core.exceptions import SynchronousOnlyOperation
from django.db import OperationalError, connection
from django.http import HttpResponse, StreamingHttpResponse
from django.test import AsyncClient, RequestFactory, override_settings
from django.urls import path
from django.views import View

from django_pglock import (
    Lease,
    LockError,
    LockLost,
    LockNotAvailable,
    leader,
    lock,
    lock_all,
    lock_view,
    semaphore,
    try_lock,
)
from django_pglock.locks.coroutine_sessions import lock_sessions_for
from django_pglock.models import AdvisoryLock
from tests.db.locks.test_api import somebody as somebody  # a fixture

pytestmark = pytest.mark.django_db(transaction=True)


def rows():
    """Return (granted, waiting) of all advisory locks in this database."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FILTER (WHERE granted), count(*) FILTER (WHERE NOT granted) FROM pg_locks"
            " WHERE locktype = 'advisory'"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        return cursor.fetchone()


async def arows():
    return await asyncio.to_thread(_closing, rows)


def _closing(function):
    """Ask Django's connection of a thread that nobody else will close."""
    try:
        return function()
    finally:
        connection.close()


async def until(predicate, why):
    deadline = time.monotonic() + 60
    while not await predicate():
        assert time.monotonic() < deadline, why
        await asyncio.sleep(0.01)


async def some_wait():
    return (await arows())[1] > 0


@pytest.mark.parametrize("scope", ["session", "transaction"])
def test_coroutines_of_one_process_exclude_each_other(scope):
    """Sharing Django's connection, PostgreSQL would take them for one holder and let all of them in."""
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
def test_busy(somebody, timeout, scope):
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
                names = await asyncio.to_thread(_closing, lambda: {row.name for row in AdvisoryLock.objects.held()})
                assert {"outer", "inner"} <= names
        assert (await arows()) == (1, 0)

    asyncio.run(main())


def test_all_kinds_work_for_coroutines(somebody):
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
        await until(some_wait, "nobody waits")
        for task in waiting:
            task.cancel()
        for task in waiting:
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: _is(arows, (1, 0)), "a waiter was left")
        async with lock("b", scope=scope):
            pass

    asyncio.run(main())


async def _is(function, value):
    return await function() == value


def sessions():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )
        return cursor.fetchone()[0]


async def asessions():
    return await asyncio.to_thread(_closing, sessions)


def test_a_wait_that_is_cut_short_while_it_connects_leaves_no_session():
    async def main():
        before = await asessions()
        kept = []
        for moment in range(40):
            coming = asyncio.create_task(lock(f"a {moment}").aacquire())
            await asyncio.sleep(moment * 0.00025)
            coming.cancel()
            try:
                await (await coming).release()
            except asyncio.CancelledError as error:
                kept.append(error)  # Python would close what only its frames know, sooner or later
        lock_sessions_for("default").close_idle()
        await until(lambda: _is(asessions, before), "a session is left")

    asyncio.run(main())


def test_an_inner_wait_that_is_cut_short_does_not_cost_the_outer_lock(somebody):
    """``asyncio.timeout`` around an inner lock is how one writes it; the outer one must still be held."""
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


def test_cancels_at_any_moment_leave_nothing():
    """The cancel meets the statement on its way there, in the server, on its way back, and while giving back."""

    async def visit(pause):
        async with lock("hot"):
            await asyncio.sleep(pause)

    async def main():
        for number in range(60):
            tasks = [asyncio.create_task(visit(0.0005)) for _ in range(3)]
            await asyncio.sleep(number * 0.0001)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: _is(arows, (0, 0)), "something was left")

    asyncio.run(main())


@pytest.mark.parametrize("what", [lock("a"), lock_all("a", "b"), semaphore("a", limit=2), Lease("a"), leader("a")])
def test_what_is_for_threads_is_refused_in_a_coroutine_and_says_what_to_write(what):
    async def main():
        with pytest.raises(SynchronousOnlyOperation, match="async with"), what:
            pass

    asyncio.run(main())


def test_the_event_loop_goes_on_while_a_coroutine_waits(somebody):
    somebody.holds("a")

    async def main():
        waiting = asyncio.create_task(lock("a").aacquire())
        # Were the loop to wait as well, it would never come to see that, nor to free the lock.
        await until(some_wait, "nobody waits")
        assert not waiting.done()
        await asyncio.to_thread(somebody.ask, "SELECT pg_advisory_unlock_all()")
        await (await waiting).release()

    asyncio.run(main())


def test_a_loop_that_has_ended_is_forgotten():
    from django_pglock.locks.coroutine_sessions import _by_loop

    async def main():
        await asyncio.gather(*[lock("a")(_nothing)() for _ in range(3)])

    for _ in range(3):
        asyncio.run(main())
    assert len(_by_loop) == 0


async def _nothing():
    await asyncio.sleep(0.001)


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
            waiting = asyncio.create_task(lock("a").aacquire())
            await until(some_wait, "nobody waits")
            pid = await asyncio.to_thread(
                somebody.ask, "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            )
            await asyncio.to_thread(somebody.ask, "SELECT pg_cancel_backend(%s)", pid)
            with pytest.raises(OperationalError, match="user request"):
                await waiting
        assert (await arows()) == (1, 0)

    asyncio.run(main())


def lock_sessions():
    """Return how many sessions of coroutines' locks there are."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '/* django_pglock%%' AND pid <> pg_backend_pid()"
        )
        return cursor.fetchone()[0]


async def asessions_of_locks():
    return await asyncio.to_thread(_closing, lock_sessions)


@override_settings(DJANGO_PGLOCK={"ASYNC_SESSIONS": 2})
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


async def in_a_task(make):
    """Take a lock as a coroutine of its own."""
    return await asyncio.create_task(make.aacquire())


# Left behind


def test_a_handle_that_is_dropped_frees_its_lock(somebody, caplog):
    async def main():
        await asyncio.create_task(_drop("a"))
        assert await asyncio.to_thread(somebody.can_have, "a")

    asyncio.run(main())
    assert "'a' was freed because its handle was dropped" in caplog.text


async def _drop(name):
    await lock(name).aacquire()


@pytest.mark.parametrize("shared_lockable", [False, True])
def test_an_asynchronous_generator_that_nobody_goes_on_with_frees_its_lock(somebody, shared_lockable):
    """Python has it closed by another task, some time later."""
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
        await until(lambda: asyncio.to_thread(somebody.can_have, "a"), "the lock is held for ever")

    asyncio.run(main())


def test_a_session_does_not_go_back_with_an_open_transaction(somebody):
    somebody.holds("b")
    box = []

    async def owner():
        box.append(await lock("a", scope="transaction").aacquire())
        with suppress(LockNotAvailable, OperationalError):
            await lock("b", scope="transaction", timeout=0.5).aacquire()

    async def main():
        task = asyncio.create_task(owner())
        await until(some_wait, "nobody waits")
        await box.pop().release()
        await task
        await until(lambda: asyncio.to_thread(somebody.can_have, "a"), "the transaction is open yet")

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
        await until(some_wait, "nobody waits")
        await asyncio.wait_for(box.pop().release(), 60)
        await asyncio.to_thread(somebody.ask, "SELECT pg_advisory_unlock_all()")
        await task
        await until(lambda: _is(arows, (0, 0)), "it is held yet")

    asyncio.run(main())


def test_a_handle_that_is_the_result_of_a_task_is_dropped_with_it(somebody):
    async def main():
        handle = await asyncio.create_task(lock("a").aacquire())
        assert handle
        del handle
        await until(lambda: asyncio.to_thread(_collected, somebody, "a"), "it is held yet")

    asyncio.run(main())


def _collected(somebody, name):
    gc.collect()
    return somebody.can_have(name)


# Views


#: For the first of several requests: all others have been answered.
answered = None


@lock_view("checkout:{pk}", methods=["POST"])
async def checkout(request, pk):
    await answered.wait()
    return HttpResponse("paid")


@lock_view("stream", on_busy=lambda busy, request: HttpResponse("busy", status=503))
async def stream(request):
    async def pieces():
        for number in range(3):
            await asyncio.sleep(0)
            yield str(number)

    return StreamingHttpResponse(pieces())


@lock_view("class")
class AsyncView(View):
    async def get(self, request):
        return HttpResponse("done")


urlpatterns = [
    path("checkout/<int:pk>", checkout),
    path("stream", stream),
    path("class", AsyncView.as_view()),
]


@override_settings(ROOT_URLCONF=__name__)
def test_async_views_answer_the_second_of_two_requests(somebody):
    async def main():
        global answered
        client, answered = AsyncClient(), asyncio.Event()
        posts = [asyncio.create_task(client.post("/checkout/7")) for _ in range(5)]

        async def only_one_is_left():
            return sum(post.done() for post in posts) == 4

        await until(only_one_is_left, "the others wait")
        answered.set()
        answers = await asyncio.gather(*posts)
        assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409, 409]
        assert {answer.headers.get("Retry-After") for answer in answers if answer.status_code == 409} == {"1"}
        assert (await client.get("/class")).content == b"done"
        await asyncio.to_thread(somebody.holds, "class")
        await asyncio.to_thread(somebody.holds, "checkout:7")
        assert (await client.get("/class")).status_code == 409
        assert (await client.get("/checkout/7")).status_code == 200

    asyncio.run(main())


def test_an_async_stream_holds_its_lock_until_it_is_closed(somebody):
    async def main():
        request = RequestFactory().get("/")
        response = await stream(request)
        assert not await asyncio.to_thread(somebody.can_have, "stream")
        assert (await asyncio.create_task(stream(request))).status_code == 503
        assert b"".join([piece async for piece in response]) == b"012"
        await asyncio.to_thread(response.close)
        assert await asyncio.to_thread(somebody.can_have, "stream")

    asyncio.run(main())
