"""Database sessions for coroutines: a few connections of our own for each event loop, outside Django's.

Django's connection belongs to a thread, and all coroutines of a loop share it; PostgreSQL would take them for one
holder. So each coroutine that holds or awaits locks gets a session to itself, and goes on in the same one when it takes
another lock. What is idle is kept for the next, and closed when the loop ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any
from weakref import WeakKeyDictionary

from django.db.utils import DatabaseErrorWrapper
from psycopg import AsyncConnection, Notify

from django_pglock.conf import get_settings
from django_pglock.db import connection_for, has_ended
from django_pglock.errors import LockError
from django_pglock.forking import keep_from_children
from django_pglock.keys import Key
from django_pglock.locks.conversation import HANG_UP, Row
from django_pglock.locks.statements import comment

logger = logging.getLogger("django_pglock.locks")
#: Seconds after which somebody who waits for a session is told that there are too few.
PATIENCE = 5.0


class AsyncSession:
    """A connection that one coroutine has to itself. ``depth`` counts the locks that it holds or awaits there."""

    def __init__(self, raw: AsyncConnection[Any], alias: str) -> None:
        self.raw = raw
        self.alias = alias
        self.depth = 0
        #: The coroutine's sessions, this one among them while it has it.
        self.owner: dict[str, AsyncSession] = {}
        #: The locks held here, each as often as it is.
        self.held: list[Key] = []

    @property
    def has_ended(self) -> bool:
        """Whether the session is gone, as far as can be seen without asking the server."""
        return has_ended(self.raw)

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of the locks held here."""
        return frozenset(key.number for key in self.held)

    async def send(self, statement: str, params: dict[str, Any] | None = None) -> Row | None:
        """Send a statement and return the last row of its answer. Errors are Django's."""
        if statement == HANG_UP:
            self.end()
            return None
        with DatabaseErrorWrapper(connection_for(self.alias)):
            cursor = await self.raw.execute(comment(self.held) + statement, params)
            while cursor.nextset():
                pass
            return await cursor.fetchone() if cursor.description else None

    async def notifications(self) -> AsyncGenerator[Notify, None]:
        """Yield what arrives on the channels that this session listens to."""
        with DatabaseErrorWrapper(connection_for(self.alias)):
            async for notification in self.raw.notifies():
                yield notification

    def end(self) -> None:
        """End the session at once, and every lock in it; waits for nothing."""
        self.raw.pgconn.finish()


class AsyncSessions:
    """The sessions of one event loop on one database alias."""

    def __init__(self, alias: str, *, limit: int | None = None) -> None:
        self.alias = alias
        self._all: set[AsyncSession] = set()
        self._idle: list[AsyncSession] = []
        self._own: WeakKeyDictionary[asyncio.Task[Any], dict[str, AsyncSession]] = WeakKeyDictionary()
        self._limit = limit or get_settings().ASYNC_SESSIONS
        self._free = asyncio.Semaphore(self._limit)
        self._end = self._close_at_the_end()
        self._is_watching = False

    async def borrow(self, scope: str) -> AsyncSession:
        """Return the session that this coroutine uses for locks of ``scope``, or one that is idle, or a new one.

        Raises ``LockError`` when all are in use for longer than ``PATIENCE``.
        """
        own = self._own_sessions()
        session = own.get(scope)
        if session is None:
            await self._wait_for_room()
            try:
                session = self._take_idle() or await self._open()
            except BaseException:
                self._free.release()
                raise
            own[scope], session.owner = session, own
        session.depth += 1
        return session

    def give_back(self, session: AsyncSession) -> None:
        """Say that one lock less is held or awaited there."""
        session.depth -= 1
        if session.depth == 0:
            for scope in [scope for scope, owned in session.owner.items() if owned is session]:
                del session.owner[scope]
            self._free.release()
            if session.has_ended:
                self._forget(session)
            else:
                self._idle.append(session)

    def close_idle(self) -> None:
        """End the sessions that nobody uses."""
        while self._idle:
            self._forget(self._idle.pop())

    def _own_sessions(self) -> dict[str, AsyncSession]:
        task = asyncio.current_task()
        if task is None:
            raise LockError("There is no coroutine here that could hold a lock.")
        return self._own.setdefault(task, {})

    async def _wait_for_room(self) -> None:
        try:
            await asyncio.wait_for(self._free.acquire(), PATIENCE)
        except (TimeoutError, asyncio.TimeoutError):
            raise LockError(
                f"All {self._limit} database sessions for locks of this event loop are in use. Hold locks for a "
                "shorter time, or raise DJANGO_PGLOCK['ASYNC_SESSIONS']."
            ) from None

    def _take_idle(self) -> AsyncSession | None:
        while self._idle:
            session = self._idle.pop()
            if not session.has_ended:
                return session
            self._forget(session)
        return None

    def _forget(self, session: AsyncSession) -> None:
        session.end()
        self._all.discard(session)

    async def _open(self) -> AsyncSession:
        connection = connection_for(self.alias)
        with DatabaseErrorWrapper(connection):
            parameters: dict[str, Any] = connection.get_connection_params()
            parameters.pop("cursor_factory", None)
            parameters.pop("pool", None)
            raw = await _connect(parameters)
        keep_from_children(raw)
        session = AsyncSession(raw, self.alias)
        self._all.add(session)
        if not self._is_watching:
            # From here on the loop knows that there is something to close when it ends.
            self._is_watching = True
            await self._end.__anext__()
        return session

    async def _close_at_the_end(self) -> AsyncGenerator[None, None]:
        # asyncio closes the generators that are still open when a loop ends; there is no other hook.
        try:
            yield
        finally:
            while self._all:
                self._all.pop().end()
            # What waits is bound to its loop, which could not be collected while it is known here.
            _of_loops.pop(asyncio.get_running_loop(), None)


async def _connect(parameters: dict[str, Any]) -> AsyncConnection[Any]:
    connecting = asyncio.ensure_future(AsyncConnection.connect(**parameters, autocommit=True))
    try:
        return await asyncio.shield(connecting)
    except asyncio.CancelledError:
        # Cancelled halfway it would stay open until Python happens to collect it.
        connecting.add_done_callback(_end_at_once)
        raise


def _end_at_once(connecting: asyncio.Future[AsyncConnection[Any]]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().pgconn.finish()


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, AsyncSessions]] = WeakKeyDictionary()


def sessions_for(alias: str) -> AsyncSessions:
    """Return the sessions of the running event loop on a database alias."""
    by_alias = _of_loops.setdefault(asyncio.get_running_loop(), {})
    if alias not in by_alias:
        by_alias[alias] = AsyncSessions(alias)
    return by_alias[alias]
