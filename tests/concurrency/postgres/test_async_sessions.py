"""Sessions for coroutines: opened, given to the next user, and ended, whatever is cancelled meanwhile."""

from __future__ import annotations

import asyncio
import gc
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
from django.db import OperationalError

from django_pglock import LockNotAvailable, lock
from django_pglock.errors import ConfigurationError
from django_pglock.locks.coroutine_sessions import MOST_IDLE
from django_pglock.postgres import sessions
from tests.concurrency.locks.sessions import (
    _is,
    asessions,
    in_a_task,
    some_wait,
    until,
)

pytestmark = pytest.mark.django_db(transaction=True)


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
                kept.append(error)  # Python may close objects that only its frames refer to
        await until(lambda: _is(asessions, before + 1), "another session is left than the one that they share")

    asyncio.run(main())


async def steady(count):
    """Return a number that has stopped changing: sessions of an earlier test end a moment later."""
    before, now = -1, await count()
    while before != now:
        await asyncio.sleep(0.2)
        before, now = now, await count()
    return now


def test_few_sessions_of_single_locks_are_kept_for_the_next_ones():
    """Otherwise a worker would keep as many sessions as its coroutines had ever needed at once, until its end."""

    async def main():
        before = await steady(asessions)
        held = [await in_a_task(lock("a", number, scope="transaction")) for number in range(MOST_IDLE + 3)]
        for handle in held:
            await handle.release()
        await until(lambda: _is(asessions, before + MOST_IDLE), "unused sessions are left")
        async with lock("again", scope="transaction"):
            assert await asessions() == before + MOST_IDLE

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


def test_a_lock_of_a_coroutine_is_refused_if_gevent_has_replaced_threads(monkeypatch):
    """Django would refuse to open its session, and would say something about synchronous code."""
    gevent = SimpleNamespace(is_module_patched=lambda name: name == "threading")
    monkeypatch.setitem(sys.modules, "gevent.monkey", gevent)

    async def main():
        with pytest.raises(ConfigurationError, match=r"gevent .* Write `with lock"):
            await lock("a").aacquire()

    asyncio.run(main())


def test_a_cancelled_wait_through_djangos_cursor_leaves_no_error_without_a_reader(somebody, monkeypatch):
    """A statement goes through Django's cursor if an APM wraps it."""
    monkeypatch.setattr(sessions, "is_plain_django", lambda connection: False)
    somebody.holds("a")
    unread = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unread.append(context["message"]))
        waiter = asyncio.create_task(lock("a", scope="transaction").aacquire())
        await until(some_wait, "the coroutine does not wait")
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter

    asyncio.run(main())
    gc.collect()
    assert unread == []
