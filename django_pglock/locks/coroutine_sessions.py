"""The sessions in which coroutines hold their locks.

An event loop has ``OWN_SESSIONS`` sessions for single coroutines. A coroutine that holds or requests locks gets one
of them, and uses it for all its locks. So PostgreSQL knows which session waits for which, and ends deadlocks. If all
are in use, further coroutines acquire their locks in one shared session, because a session can hold any number of
locks. No statement waits in the server on the shared session, because all other coroutines would wait as well. A
coroutine that has to wait polls, and moves to a session of its own when one is given back. For PostgreSQL the shared
session is one holder. This package ensures that the coroutines in it exclude each other.

So no coroutine fails or waits because there are too few sessions, if the server accepts ``OWN_SESSIONS`` and one
more. Locks that need a whole session (of scope "transaction", or with ``max_hold``) open one more. If the server
refuses it, these locks are busy. A pooler does not refuse a session. It lets the client wait until another client
disconnects. So the wait for one more session is limited. After that, it counts as a refusal.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from django.db import OperationalError

from django_pglock.errors import LockError
from django_pglock.locks.connection_hooks import session_locks_of
from django_pglock.locks.options import Request
from django_pglock.locks.session_locks import LockRecord, SessionLocks
from django_pglock.locks.statements.steps import END_SESSION, Row
from django_pglock.loggers import RateOfRecords, get_logger
from django_pglock.postgres.async_sessions import AsyncSession, AsyncSessionPool, NoSession, refuse_greenlets

#: Seconds between two polls of a coroutine in the shared session: the first pause, and the longest.
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.25
#: The number of sessions of an event loop that each serve the locks of a single coroutine. Enough for deadlocks to be
#: found where few coroutines hold locks, and few enough for the server's ``max_connections``.
OWN_SESSIONS = 10
#: Seconds for which a lock waits for one more session, if the loop has one. A pooler may have none left for the loop.
OPEN_WITHIN = 10.0

logger = get_logger("django_pglock.locks")
#: For sessions that cannot be opened. Each coroutine tries again and again.
no_session = RateOfRecords(60.0)


class LockSession:
    """A session in which one coroutine, or several that share it, hold locks."""

    def __init__(self, session: AsyncSession, *, is_shared: bool = False) -> None:
        self.session = session
        self.is_shared = is_shared
        #: How many locks its owner holds or requests in it.
        self.lock_count = 0
        #: The sessions of the owner by scope. This session is one of them as long as it belongs to the owner.
        self.owner: dict[str, LockSession] = {}

    @property
    def locks(self) -> SessionLocks:
        """The records of the session's locks."""
        return session_locks_of(self.session.connection)

    def records_of(self, request: Request) -> list[LockRecord]:
        """Return the records with a lock of this request that is held in this session, or may be held."""
        records = self.locks.records(self.session.connection)
        return [record for record in records if not record.numbers.isdisjoint(request.numbers)]

    def numbers(self, *, without: LockRecord | None = None) -> frozenset[int]:
        """Return the numbers of the locks that are held in this session, or may be held."""
        return self.locks.numbers(self.session.connection, without=without)

    def allows(self, request: Request, owner: Any) -> bool:
        """Return whether no other coroutine has one of these locks in this session in a conflicting mode."""
        return all(
            record.owner is owner or (record.request.shared and request.shared) for record in self.records_of(request)
        )

    async def send(self, record: LockRecord, statement: str) -> Row | None:
        """Send a statement about a record and return the row of its answer. For ``END_SESSION``, end the session."""
        if statement == END_SESSION:
            self.session.end()
            return None
        try:
            return await self.session.send(self.locks.comment(without=record) + statement)
        finally:
            if self.locks.pending:
                self.locks.free_pending()


class LockSessions:
    """The sessions for locks of one event loop on one database alias."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._open: set[AsyncSession] = set()
        self._pool = AsyncSessionPool(alias, limit=OWN_SESSIONS, ended=self._open.discard)
        # By ``id()``. A WeakKeyDictionary would run a function in Python at the end of each task, and an exception that
        # a signal handler raises in it would vanish.
        self._by_task: dict[int, tuple[ref[asyncio.Task[Any]], dict[str, LockSession]]] = {}
        self._shared: LockSession | None = None
        self._sharing = asyncio.Lock()
        self._change = asyncio.Event()
        self._end = self._close_at_the_end()
        self._is_watching = False

    def owner(self) -> dict[str, LockSession]:
        """Return the object that represents this coroutine: its sessions by scope.

        Not the asyncio task, because the result of the task may be a handle, which would then be a circle of
        references.
        """
        task = asyncio.current_task()
        if task is None:
            raise LockError("An async lock must be acquired inside a coroutine that runs as an asyncio task.")
        number = id(task)
        if number not in self._by_task:
            self._by_task[number] = ref(task, partial(self._by_task.pop, number)), {}
        return self._by_task[number][1]

    def own_session(self, scope: str) -> LockSession | None:
        """Return the session that this coroutine already has for locks of ``scope``."""
        lock_session = self.owner().get(scope)
        if lock_session is not None:
            lock_session.lock_count += 1
        return lock_session

    async def new_session(self, scope: str, *, may_share: bool) -> LockSession | None:
        """Return a session for this coroutine alone. None: there is none left, and the coroutine may share one."""
        if may_share and not self._pool.has_capacity:
            return None
        owner = self.owner()
        try:
            session = await self._pool.get(OPEN_WITHIN)
        except OperationalError as error:
            if not self._open:
                raise
            # The server accepts no more sessions. If there is a shared one, the coroutine can use it.
            if isinstance(error, NoSession) and not may_share and no_session.allows():
                logger.warning("%s A lock waits for it as for a busy lock. %s", error, self._advice)
            return None
        self._open.add(session)
        lock_session = owner[scope] = LockSession(session)
        lock_session.owner, lock_session.lock_count = owner, 1
        return lock_session

    @property
    def _advice(self) -> str:
        return (
            f"This event loop has {len(self._open)} sessions for locks. It may open up to {self._pool.limit + 1}, and "
            "one more for each lock with max_hold or of scope 'transaction'. If a pooler or the role allows fewer, "
            "raise that limit."
        )

    async def shared_session(self) -> LockSession:
        """Return the session that coroutines share."""
        async with self._sharing:
            if self._shared is None or self._shared.session.has_ended:
                try:
                    session = await self._pool.take(OPEN_WITHIN)
                except NoSession as error:
                    raise NoSession(f"{error} {self._advice}") from None
                self._open.add(session)
                self._shared = LockSession(session, is_shared=True)
        return self._shared

    def sessions_with(self, owner: dict[str, LockSession], request: Request) -> list[tuple[str, LockSession]]:
        """Return the scopes and sessions in which a coroutine already has one of these locks."""
        lock_sessions = [*owner.items(), *([("session", self._shared)] if self._shared is not None else [])]
        return [
            (scope, each)
            for scope, each in lock_sessions
            if any(record.owner is owner for record in each.records_of(request))
        ]

    def give_back(self, lock_session: LockSession) -> None:
        """Note that a session has one lock or request less. After the owner's last one, return it to the pool."""
        self._open.add(lock_session.session)
        if not lock_session.is_shared:
            lock_session.lock_count -= 1
            if lock_session.lock_count == 0:
                for scope in [scope for scope, owned in lock_session.owner.items() if owned is lock_session]:
                    del lock_session.owner[scope]
                self._pool.put(lock_session.session)
        self._change.set()
        self._change = asyncio.Event()

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until a lock is given back in any session, up to ``seconds``."""
        try:
            await asyncio.wait_for(self._change.wait(), seconds)
        except (TimeoutError, asyncio.TimeoutError):
            return

    def detach(self, session: AsyncSession) -> None:
        """Keep a session after the end of this loop, because its lock is held for a response that other code sends."""
        self._open.discard(session)

    def close_idle(self) -> None:
        """End the unused sessions."""
        self._pool.close_idle()

    async def watch_the_loop(self) -> None:
        """Ensure that all sessions are closed when the loop ends."""
        if not self._is_watching:
            self._is_watching = True
            await self._end.__anext__()

    async def _close_at_the_end(self) -> AsyncGenerator[None, None]:
        # asyncio closes the generators that are still open when a loop ends; there is no other hook.
        try:
            yield
        finally:
            # Also a session that was opened, and not needed any more, is in the pool.
            self.close_idle()
            while self._open:
                self._open.pop().end()
            # An Event and a Lock refer to their loop. So the loop could not be collected while they are stored here.
            _by_loop.pop(asyncio.get_running_loop(), None)


_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, LockSessions]] = WeakKeyDictionary()


def lock_sessions_for(alias: str) -> LockSessions:
    """Return the sessions for locks of the running event loop on a database alias.

    Raises ``ConfigurationError`` under gevent.
    """
    by_alias = _by_loop.setdefault(asyncio.get_running_loop(), {})
    if alias not in by_alias:
        refuse_greenlets("A lock of a coroutine", "Write `with lock(...)` in synchronous code, or run coroutines")
        by_alias[alias] = LockSessions(alias)
    return by_alias[alias]
