"""The thread that speaks to the database for the leases of this process, with one event loop and its own sessions.

Only code that holds the GIL can delay the renewals. One thread is enough for any number of leases. It starts with the
first lease. While there is no lease, it has no open session.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from django.db import Error as DatabaseFailure
from django.db import OperationalError
from psycopg.sql import quote

from django_pglock.postgres.sessions import AsyncSession, open_session, refuse_greenlets

TABLE = '"django_pglock_lease"'
#: The channel for released leases. The payload is the lease's key.
CHANNEL = "django_pglock_lease"
#: Set explicitly, because the role may have another default. At a higher level, one of two concurrent sessions would
#: fail.
READ_COMMITTED = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED;"
# Whether a lease is free: it has expired, or its expiry is the date of its release, however the clock was set since. A
# lease without a ttl has no expiry.
_IS_FREE = "l.expires_at <= GREATEST(now.t, l.released_at)"
# How far the last date that was written into a lease is ahead of the clock.
_AHEAD = "(GREATEST(l.renewed_at, l.released_at) - now.t)"
#: Acquires a lease that is free. If another holder has the lease, the last SELECT returns the seconds until its expiry.
#: If the clock was put back since the lease was renewed or released, all of its dates are put back, too, as if that had
#: been now. So a dead holder keeps the lease for one ttl more, and not until the clock has caught up.
ACQUIRE = f"""
WITH now AS MATERIALIZED (SELECT clock_timestamp() AS t), put_back AS (
    UPDATE {TABLE} AS l SET acquired_at = acquired_at - {_AHEAD}, renewed_at = renewed_at - {_AHEAD},
        expires_at = expires_at - {_AHEAD}, released_at = released_at - {_AHEAD}
    FROM now WHERE key = %(key)s AND {_AHEAD} > interval '1 second' AND NOT {_IS_FREE}
), taken AS (
    INSERT INTO {TABLE} AS l (key, name, owner, holder, token, ttl, acquired_at, renewed_at, expires_at)
    SELECT %(key)s, %(name)s, %(owner)s, %(holder)s, 1, %(ttl)s::interval, t, t,
        t + %(ttl)s::interval
    FROM now
    ON CONFLICT (key) DO UPDATE SET name = EXCLUDED.name, owner = EXCLUDED.owner, holder = EXCLUDED.holder,
        token = l.token + 1, ttl = EXCLUDED.ttl, acquired_at = EXCLUDED.acquired_at, renewed_at = EXCLUDED.renewed_at,
        expires_at = EXCLUDED.expires_at, released_at = NULL
    WHERE l.expires_at <= GREATEST((SELECT t FROM now), l.released_at)
    RETURNING token)
SELECT token, NULL::float AS seconds FROM taken
UNION ALL
SELECT NULL, extract(epoch FROM expires_at - clock_timestamp()) FROM {TABLE}
WHERE key = %(key)s AND NOT EXISTS (SELECT FROM taken)
"""
OURS = "key = %(key)s AND holder = %(holder)s AND token = %(token)s AND released_at IS NULL"
RENEW = f"""
UPDATE {TABLE} SET renewed_at = clock_timestamp(), expires_at = clock_timestamp() + %(ttl)s::interval,
    ttl = %(ttl)s::interval
WHERE {OURS} AND expires_at > clock_timestamp() RETURNING token
"""
#: With ``min_hold``, a released lease does not expire before it has been held for that time.
RELEASE = f"""
WITH now AS MATERIALIZED (SELECT clock_timestamp() AS t), freed AS (
    UPDATE {TABLE} SET released_at = t, expires_at = greatest(t, least(t, acquired_at) + %(min_hold)s::interval)
    FROM now WHERE {OURS} AND (expires_at IS NULL OR expires_at > t) RETURNING key)
SELECT key, pg_notify('{CHANNEL}', key::text) FROM freed
"""
#: After an ACQUIRE whose answer was lost. The holder's id belongs to only one attempt.
UNDO = f"""
UPDATE {TABLE} SET released_at = t, expires_at = t FROM (SELECT clock_timestamp() AS t) AS now
WHERE holder = %(holder)s
"""
#: The largest number of sessions to a database: one that listens, and the others for statements, which take about a
#: millisecond. More than one of these, because one may be half open.
SESSIONS = 3
#: Seconds to wait for a session and an answer. Statements about leases are short.
ANSWER_WITHIN = 15.0
#: Seconds between two attempts to listen again after the session for that has ended.
LISTEN_AGAIN = 1.0


class User(Protocol):
    """A user of sessions: a holder of a lease."""

    def lose_to_parent(self) -> None: ...


class LeaseThread:
    """The loop and its thread. ``submit`` runs coroutines there."""

    def __init__(self) -> None:
        # Not the platform's default: psycopg cannot work on Windows' proactor.
        self.loop = asyncio.SelectorEventLoop()
        #: For each alias: its idle sessions, and the semaphore at which holders wait for a session, in their order.
        self._idle: dict[str, list[AsyncSession]] = {}
        self._free: dict[str, asyncio.Semaphore] = {}
        #: For each alias: the task that listens, and those that wait for the release of a lease, by its key.
        self._listening: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[tuple[str, int], asyncio.Event] = {}
        self._users: set[User] = set()
        self._discarded: set[asyncio.Task[Any]] = set()
        #: This process was forked from the one that has the thread.
        self.is_inherited = False
        threading.Thread(target=self.loop.run_forever, name="django_pglock leases", daemon=True).start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine in the thread's loop, without waiting. In any thread, also in a destructor."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    # The following methods run in the thread's loop

    def add_user(self, user: User) -> None:
        """Note that a holder needs sessions from now on."""
        self._users.add(user)

    def remove_user(self, user: User) -> None:
        """Note that a holder needs no more sessions. After the last holder, close all sessions."""
        self._users.discard(user)
        if not self._users:
            while self._listening:
                self._listening.popitem()[1].cancel()
            self._waiting.clear()
            for idle in self._idle.values():
                while idle:
                    idle.pop().end()

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
        self._discarded.add(sending)
        sending.add_done_callback(self._discard)
        sending.cancel()
        raise OperationalError(f"the server has not answered within {within:g} s")

    def _discard(self, sending: asyncio.Task[Any]) -> None:
        self._discarded.discard(sending)
        if not sending.cancelled():
            sending.exception()  # otherwise asyncio would log that the exception was not retrieved

    async def _execute(self, alias: str, statement: str, params: Mapping[str, Any]) -> Any:
        async with self._session(alias) as session:
            values = {name: quote(value, session.raw) for name, value in params.items()}
            return await session.send(READ_COMMITTED + statement % values)

    @asynccontextmanager
    async def _session(self, alias: str) -> AsyncIterator[AsyncSession]:
        """Lend a session of ``alias``. It is ended if the block raises an exception."""
        idle = self._idle.setdefault(alias, [])
        async with self._free.setdefault(alias, asyncio.Semaphore(SESSIONS)):
            while idle and idle[-1].has_ended:
                idle.pop().end()
            session = idle.pop() if idle else await open_session(alias)
            is_over = True
            try:
                yield session
                is_over = not (self._users and session.is_reusable)
            finally:
                if is_over:
                    session.end()
                else:
                    idle.append(session)

    async def wait_for_release(self, alias: str, key: int, seconds: float) -> None:
        """Wait until a lease is released, up to ``seconds``. Behind a pooler no notification arrives."""
        if alias not in self._listening or self._listening[alias].done():
            self._listening[alias] = self.loop.create_task(self._listen(alias))
        released = self._waiting.setdefault((alias, key), asyncio.Event())
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(released.wait(), seconds)

    async def _listen(self, alias: str) -> None:
        while True:
            with suppress(DatabaseFailure):
                async with self._session(alias) as session:
                    await session.send(f"LISTEN {CHANNEL}")
                    # There was no notification of leases that were released before the LISTEN.
                    for each in [each for each in self._waiting if each[0] == alias]:
                        self._waiting.pop(each).set()
                    async for payload in session.notifications():
                        with suppress(KeyError, ValueError):
                            self._waiting.pop((alias, int(payload))).set()
            await asyncio.sleep(LISTEN_AGAIN)

    def mark_inherited(self) -> None:
        """After a fork, tell the holders in the child process that their leases belong to the parent."""
        self.is_inherited = True
        for user in self._users:
            user.lose_to_parent()


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
