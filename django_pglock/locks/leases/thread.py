"""The thread that renews the leases of this process. It has one event loop and its own database sessions.

Only code that holds the GIL can delay the renewals. One thread is enough for any number of leases. It starts with the
first lease. While there is no lease, it has no open session.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from django.db import OperationalError
from psycopg.sql import quote

from django_pglock.locks.leases.listener import ReleaseListener
from django_pglock.locks.leases.statements import READ_COMMITTED
from django_pglock.postgres.async_sessions import AsyncSession, AsyncSessionPool, refuse_greenlets

T = TypeVar("T")
#: The largest number of sessions: one that listens, and the others for statements, which take about a millisecond. More
#: than one of these, because one may be half open.
SESSIONS = 4
#: Seconds to wait for a session and an answer. Statements about leases are short.
ANSWER_WITHIN = 15.0


class User(Protocol):
    """A user of sessions: a holder of a lease."""

    def lose_to_parent(self) -> None: ...


class LeaseThread:
    """The loop and its thread. ``call`` and ``acall`` run coroutines there."""

    def __init__(self) -> None:
        # Not the platform's default: psycopg cannot work on Windows' proactor.
        self.loop = asyncio.SelectorEventLoop()
        self._sessions: dict[str, AsyncSessionPool] = {}
        # For each alias: holders wait here for a session, in their order.
        self._free: dict[str, asyncio.Semaphore] = {}
        self._listeners: dict[str, ReleaseListener] = {}
        self._users: set[User] = set()
        self._started: set[asyncio.Task[Any]] = set()
        #: This process was forked from the one that has the thread.
        self.is_inherited = False
        threading.Thread(target=self.loop.run_forever, name="django_pglock leases", daemon=True).start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> None:
        """Run a coroutine in the thread's loop without waiting. May be called in any thread, also in a destructor."""
        self.loop.call_soon_threadsafe(self._start, coroutine)

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = self.loop.create_task(coroutine)
        self._started.add(task)
        task.add_done_callback(self._started.discard)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread's loop, and wait for it in this thread. An interrupt cancels it."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def acall(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread's loop, and await it in the caller's loop. A cancel there cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    # The following methods run in the thread's loop

    def add_user(self, user: User) -> None:
        """Note that a holder needs sessions from now on."""
        self._users.add(user)

    def remove_user(self, user: User) -> None:
        """Note that a holder needs no more sessions. After the last holder, close all sessions."""
        self._users.discard(user)
        if not self._users:
            for listener in self._listeners.values():
                listener.stop()
            for sessions in self._sessions.values():
                sessions.close_idle()

    async def execute(
        self, alias: str, statement: str, params: Mapping[str, Any], *, within: float = ANSWER_WITHIN
    ) -> Any:
        """Send a statement in a session of ``alias``, at READ COMMITTED. Return its first row, or None.

        Raises Django's ``OperationalError`` if there is no answer ``within`` this number of seconds. Then the statement
        is cancelled, without waiting for the end of the cancel, because the connection may be half open.
        """
        sending = asyncio.ensure_future(self._execute(alias, statement, params))
        try:
            done, _ = await asyncio.wait({sending}, timeout=within)
        except asyncio.CancelledError:
            sending.cancel()
            await asyncio.wait({sending})
            raise
        if done:
            return sending.result()
        self._started.add(sending)
        sending.add_done_callback(self._discard)
        sending.cancel()
        raise OperationalError(f"the server has not answered within {within:g} s")

    def _discard(self, sending: asyncio.Task[Any]) -> None:
        self._started.discard(sending)
        if not sending.cancelled():
            sending.exception()  # otherwise asyncio would log that the exception was not retrieved

    async def _execute(self, alias: str, statement: str, params: Mapping[str, Any]) -> Any:
        async with self.session(alias) as session:
            values = {name: quote(value, session.raw) for name, value in params.items()}
            return await session.send(READ_COMMITTED + statement % values)

    @asynccontextmanager
    async def session(self, alias: str) -> AsyncIterator[AsyncSession]:
        """Lend a session of ``alias``. It is ended if the block raises an exception."""
        sessions = self._sessions.setdefault(alias, AsyncSessionPool(alias, limit=SESSIONS))
        async with self._free.setdefault(alias, asyncio.Semaphore(SESSIONS)):
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
        """After a fork, tell the holders in the child process that their leases belong to the parent."""
        self.is_inherited = True
        for user in self._users:
            user.lose_to_parent()

    def listener(self, alias: str) -> ReleaseListener:
        """Return the listener for leases on ``alias``."""
        if alias not in self._listeners:
            self._listeners[alias] = ReleaseListener(partial(self.session, alias))
        return self._listeners[alias]


_lease_thread: LeaseThread | None = None
_guard = threading.Lock()
#: Kept, because if a loop were closed, its selector would be closed, too, which the parent uses as well.
_inherited: list[LeaseThread] = []


def lease_thread() -> LeaseThread:
    """Return this process's lease thread, started if there is none. Raises ``ConfigurationError`` under gevent."""
    global _lease_thread
    # If the thread exists, the guard is not taken, because a signal handler that raises could leave it locked.
    if _lease_thread is None:
        with _guard:
            if _lease_thread is None:
                refuse_greenlets("A lease", "Use lock(), or take leases")
                _lease_thread = LeaseThread()
    return _lease_thread


def _reset_after_fork() -> None:
    # The thread does not exist in the child, and its sessions belong to the parent.
    global _lease_thread, _guard
    inherited, _lease_thread, _guard = _lease_thread, None, threading.Lock()
    if inherited is not None:
        _inherited.append(inherited)
        inherited.mark_inherited()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
