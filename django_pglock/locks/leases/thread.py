"""The thread that keeps this process's leases alive: one event loop, with database sessions of its own.

Nothing that the program does can keep it from renewing, short of holding the GIL, and one thread is enough for any
number of leases. It starts with the first lease. While there is none it has no session open.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import Error as DatabaseFailure
from django.db import OperationalError
from psycopg.sql import quote

from django_pglock.errors import ConfigurationError
from django_pglock.postgres.async_sessions import AsyncSession, AsyncSessionPool

if TYPE_CHECKING:
    from django_pglock.locks.leases.holder import LeaseHolder

T = TypeVar("T")
#: Where it is said that a lease was given back; the payload is its key.
CHANNEL = "django_pglock_lease"
#: Seconds between two attempts to listen again after the session for that has ended.
LISTEN_AGAIN = 1.0
#: Most sessions at once. Renewals are short, so few are ever in use.
SESSIONS = 20
#: Seconds between two looks whether one of them is free.
SESSION_POLL_INTERVAL = 0.01
#: Seconds to wait for a session and an answer. Statements about leases are short.
ANSWER_WITHIN = 15.0
#: Whatever the role's default is: above it, two who ask at the same time make one of them fail.
READ_COMMITTED = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED;"


class LeaseThread:
    """The loop and its thread. ``call`` and ``acall`` run coroutines there."""

    def __init__(self) -> None:
        # Not the platform's default: psycopg cannot work on Windows' proactor.
        self.loop = asyncio.SelectorEventLoop()
        self._sessions: dict[str, AsyncSessionPool] = {}
        self._listeners: dict[str, ReleaseListener] = {}
        self._users: set[LeaseHolder] = set()
        self._started: set[asyncio.Task[Any]] = set()
        #: This process was forked from the keeper's, which has the thread.
        self.is_inherited = False
        threading.Thread(target=self.loop.run_forever, name="django_pglock leases", daemon=True).start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> None:
        """Run a coroutine in the keeper's loop and wait for nothing; from any thread, in the middle of anything."""
        self.loop.call_soon_threadsafe(self._start, coroutine)

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = self.loop.create_task(coroutine)
        self._started.add(task)
        task.add_done_callback(self._started.discard)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the keeper's loop and wait for it in this thread; an interrupt cancels it."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def acall(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the keeper's loop and await it in this one; a cancel cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    # The rest runs in the keeper's loop

    def add_user(self, user: LeaseHolder) -> None:
        """Note that somebody needs sessions from now on."""
        self._users.add(user)

    def remove_user(self, user: LeaseHolder) -> None:
        """Note that somebody needs them no more; the last one closes them."""
        self._users.discard(user)
        if not self._users:
            for listener in self._listeners.values():
                listener.stop()
            for sessions in self._sessions.values():
                sessions.close_idle()

    async def ask(self, alias: str, statement: str, params: Mapping[str, Any], *, within: float = ANSWER_WITHIN) -> Any:
        """Send a statement on a session of ``alias``, at READ COMMITTED; return its first row, or None.

        Raises Django's ``OperationalError`` when the answer has not come ``within`` so many seconds. That the statement
        is cancelled is not waited for: the connection may be half open.
        """
        asking = asyncio.ensure_future(self._ask(alias, statement, params))
        try:
            done, _ = await asyncio.wait({asking}, timeout=within)
        except asyncio.CancelledError:
            asking.cancel()
            await asyncio.wait({asking})
            raise
        if done:
            return asking.result()
        self._started.add(asking)
        asking.add_done_callback(self._discard_asking)
        asking.cancel()
        raise OperationalError(f"the server has not answered within {within:g} s")

    def _discard_asking(self, asking: asyncio.Task[Any]) -> None:
        self._started.discard(asking)
        if not asking.cancelled():
            asking.exception()  # nobody waits for it any more

    async def _ask(self, alias: str, statement: str, params: Mapping[str, Any]) -> Any:
        async with self.session(alias) as session:
            values = {name: quote(value, session.raw) for name, value in params.items()}
            return await session.send(READ_COMMITTED + statement % values)

    @asynccontextmanager
    async def session(self, alias: str) -> AsyncIterator[AsyncSession]:
        """Lend a session. If what is done with it fails, it ends."""
        sessions = self._sessions.get(alias)
        if sessions is None:
            sessions = self._sessions[alias] = AsyncSessionPool(alias, limit=SESSIONS)
        while not sessions.has_room:
            await asyncio.sleep(SESSION_POLL_INTERVAL)
        session = await sessions.get()
        try:
            yield session
        except BaseException:
            session.end()
            raise
        finally:
            sessions.put(session)
            if not self._users:
                sessions.close_idle()

    def mark_inherited(self) -> None:
        """Tell the leases that this process has inherited that they are not its own."""
        self.is_inherited = True
        for user in self._users:
            user.lose_to_parent()

    def listener(self, alias: str) -> ReleaseListener:
        """Return what rings when a lease on ``alias`` is given back."""
        if alias not in self._listeners:
            self._listeners[alias] = ReleaseListener(self, alias)
        return self._listeners[alias]


class ReleaseListener:
    """Hears of leases that are given back. Deaf behind a pooler, where whoever waits has to look from time to time."""

    def __init__(self, lease_thread: LeaseThread, alias: str) -> None:
        self._lease_thread = lease_thread
        self._alias = alias
        self._waiting: dict[int, asyncio.Event] = {}
        self._task: asyncio.Task[None] | None = None

    async def wait(self, key: int, seconds: float) -> None:
        """Wait until the lease is given back, but no longer than so many seconds."""
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._listen())
        woken = self._waiting.setdefault(key, asyncio.Event())
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(woken.wait(), seconds)

    def stop(self) -> None:
        """Listen no more: nobody waits."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _listen(self) -> None:
        while True:
            with suppress(DatabaseFailure):
                async with self._lease_thread.session(self._alias) as session:
                    await session.send(f"LISTEN {CHANNEL}")
                    # What was given back before we listened was not heard.
                    self._wake_all()
                    async for payload in session.notifications():
                        self._wake(payload)
            await asyncio.sleep(LISTEN_AGAIN)

    def _wake(self, payload: str) -> None:
        with suppress(KeyError, ValueError):
            self._waiting.pop(int(payload)).set()

    def _wake_all(self) -> None:
        while self._waiting:
            self._waiting.popitem()[1].set()


def refuse_greenlets() -> None:
    """Raise ``ConfigurationError`` where gevent has replaced threads by greenlets, which share one real thread.

    A running event loop in one of them would look to Django as if all of them were coroutines.
    """
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("threading"):
        raise ConfigurationError(
            "A lease needs a thread of its own, and gevent has replaced threads by greenlets. Use lock(), or take "
            "leases in a process without gevent.monkey."
        )


_lease_thread: LeaseThread | None = None
_guard = threading.Lock()
#: Kept, for nobody may close a loop whose selector is the parent's as well.
_inherited: list[LeaseThread] = []


def lease_thread() -> LeaseThread:
    """Return this process's keeper, and start it if there is none. Raises ``ConfigurationError`` under gevent."""
    global _lease_thread
    with _guard:
        if _lease_thread is None:
            refuse_greenlets()
            _lease_thread = LeaseThread()
        return _lease_thread


def _forget_after_fork() -> None:
    # The thread stayed behind, and its sessions are the parent's.
    global _lease_thread, _guard
    parents, _lease_thread, _guard = _lease_thread, None, threading.Lock()
    if parents is not None:
        _inherited.append(parents)
        parents.mark_inherited()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
