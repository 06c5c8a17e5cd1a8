"""The holders of leases, and the thread that speaks to the database for them, with one event loop and its own sessions.

Only code that holds the GIL can delay the renewals. One thread is enough for any number of leases. It starts with the
first lease. While there is no lease, it has no open session.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import uuid4

from django.db import Error as DatabaseFailure
from django.db import OperationalError
from psycopg.sql import quote

from django_pglock.keys import Key
from django_pglock.locks.base_handle import first_line
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
#: Each attempt to hold a lease has its own id in the column ``holder``.
OURS = "key = %(key)s AND holder = %(holder)s AND released_at IS NULL"
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
#: The largest number of sessions to a database: one that listens, and the others for statements, which take about a
#: millisecond. More than one of these, because one may be half open.
SESSIONS = 3
#: Seconds between two polls of a waiter, if no notification of a release comes; with a longer ttl, a third of it.
LEASE_POLL = 1.0
#: Seconds to wait before each further attempt to release a lease.
RELEASE_RETRY_DELAYS = (0.1, 0.5, 2.0)
#: The reason if the row of a lease has another state than the holder expects.
REVOKED = "the database reports that it was revoked or has another owner"
#: Seconds to wait for a session and an answer. Statements about leases are short.
ANSWER_WITHIN = 15.0
#: Seconds between two attempts to listen again after the session for that has ended.
LISTEN_AGAIN = 1.0


def boottime() -> float:
    """Return the time of a clock that also counts while the machine sleeps, if the platform has one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class LeaseTerms(NamedTuple):
    """The terms of a lease. ``ttl`` and ``min_hold`` are in seconds; ``ttl`` None: no expiry.

    ``steps_down``: the holder gives up the lease at the first renewal that fails.
    """

    ttl: float | None
    min_hold: float
    owner: str
    steps_down: bool


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
        self._users: set[LeaseHolder] = set()
        #: This process was forked from the one that has the thread.
        self.is_inherited = False
        threading.Thread(target=self.loop.run_forever, name="django_pglock leases", daemon=True).start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine in the thread's loop, without waiting. In any thread, also in a destructor."""
        if not sys.is_finalizing():
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        # Python has stopped the thread. A generator that is still open is closed now, and would wait without end.
        coroutine.close()
        stopped: Future[Any] = Future()
        stopped.set_exception(
            RuntimeError("The process ends before its leases were released. They stay held for their ttl.")
        )
        return stopped

    # The following methods run in the thread's loop

    def add_user(self, user: LeaseHolder) -> None:
        """Note that a holder needs sessions from now on."""
        self._users.add(user)

    def remove_user(self, user: LeaseHolder) -> None:
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
        # Its exception is read, because otherwise asyncio would log that it was not.
        sending.add_done_callback(lambda sending: sending.cancelled() or sending.exception())
        sending.cancel()
        raise OperationalError(f"the server has not answered within {within:g} s")

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
            try:
                yield session
            except BaseException:
                session.end()
                raise
            if self._users and session.is_reusable:
                idle.append(session)
            else:
                session.end()

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


class LeaseHolder:
    """One attempt to hold a lease, from the first statement to the release."""

    def __init__(self, lease_thread: LeaseThread, key: Key, using: str, terms: LeaseTerms) -> None:
        #: Set when the lease is lost.
        self.lost = threading.Event()
        #: Why the lease was lost, if it was.
        self.reason = ""
        #: None until the lease is acquired.
        self.token: int | None = None
        self.ttl = terms.ttl
        self._thread, self._key, self._using, self._terms = lease_thread, key, using, terms
        #: The unique id of this attempt, in the column ``holder``.
        self._id = uuid4()
        self._deadline = math.inf
        self._renewal: asyncio.Task[None] | None = None
        #: Set when the lease is lost or released.
        self._ended = asyncio.Event()
        self._acquiring: asyncio.Task[Any] | None = None
        #: Whether the row of the lease may have the id of this attempt.
        self._may_hold = False

    @property
    def is_lost(self) -> bool:
        """Whether the lease no longer protects. Thread-safe."""
        # The clock is checked here as well: after a stop of the process, this may run before the lease thread does.
        return self.lost.is_set() or boottime() >= self._deadline

    def lose_to_parent(self) -> None:
        """Note that the lease belongs to the parent process from which this one was forked."""
        self.reason = "it is held by the process from which this one was forked"
        # A new event, because the old one may be locked by a thread that does not exist in this process.
        self.lost = threading.Event()
        self.lost.set()

    # The following methods run in the lease thread's loop

    async def acquire(self, timeout: float | None) -> bool:
        """Acquire the lease. Return whether that succeeded within ``timeout`` seconds (None: no limit).

        If it did not, ``release_unused`` has to be called.
        """
        self._acquiring = asyncio.current_task()
        self._thread.add_user(self)
        began = time.monotonic()
        while True:
            seconds = await self._try()
            if self.token is not None:
                return True
            left = max(LEASE_POLL, (self.ttl or 0) / 3)
            if timeout is not None:
                left = min(left, timeout - (time.monotonic() - began))
            if left <= 0:
                return False
            if seconds is not None:
                left = min(left, max(seconds, 0.01))
            await self._thread.wait_for_release(self._using, self._key.number, left)

    async def _try(self) -> float | None:
        """Try to acquire the lease once. If another holder has it, return the seconds until its expiry."""
        began = boottime()
        # If the answer is lost, the lease may have been granted, and without a ttl it would be held forever.
        self._may_hold = True
        self.token, seconds = await self._execute(ACQUIRE) or (None, 0.0)
        self._may_hold = self.token is not None
        if self._may_hold and self.ttl is not None:
            self._deadline = began + self.ttl
            self._restart_renewal(self.ttl)
        return seconds

    async def release_unused(self) -> None:
        """Release a lease whose handle was dropped, or whose acquire has failed or was interrupted."""
        if self._acquiring is not None:
            await asyncio.wait({self._acquiring})
        if self._may_hold:
            await self.release()
        else:
            self._thread.remove_user(self)

    async def _execute(self, statement: str, *, within: float = ANSWER_WITHIN) -> Any:
        params = {
            "key": self._key.number,
            "name": self._key.name,
            "owner": self._terms.owner,
            "holder": self._id,
            "ttl": None if self.ttl is None else timedelta(seconds=self.ttl),
            # Who has not got the lease keeps no other from it.
            "min_hold": timedelta(seconds=self._terms.min_hold if self.token is not None else 0),
        }
        return await self._thread.execute(self._using, statement, params, within=within)

    def _restart_renewal(self, ttl: float) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
        self._renewal = asyncio.ensure_future(self._keep_renewing(ttl))

    async def _keep_renewing(self, ttl: float) -> None:
        """Renew the lease three times in its ttl, until it is released or lost: at the latest at its deadline."""
        began = boottime()
        while not self.lost.is_set():
            # After a renewal without an answer there is no pause, because there is time for one more attempt.
            await asyncio.sleep(min(began + ttl / 3, self._deadline) - boottime())
            began = boottime()
            if began >= self._deadline:
                self._lose(f"it could not be renewed for {ttl:g} s")
                return
            try:
                await self._renew(min(ttl / 3, self._deadline - began))
            except (DatabaseFailure, OSError) as error:
                # A leader steps down at the first error. Any other holder can try again until the deadline.
                if self._terms.steps_down:
                    self._lose(f"it could not be renewed ({first_line(error)})")

    async def _renew(self, within: float) -> bool:
        """Renew the lease once, and set the new deadline. Return whether it is still held."""
        began = boottime()
        if await self._execute(RENEW, within=within) is None:
            self._lose(REVOKED)
            return False
        # The database counts from a later moment.
        self._deadline = began + (self.ttl or 0)
        return True

    def _lose(self, reason: str) -> None:
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()
            self._ended.set()

    async def extend(self, seconds: float | None) -> bool:
        """Extend the lease to ``seconds`` from now on (None: its ttl). Return whether it is still held."""
        self.ttl = seconds or self.ttl or 0
        # The task for renewals sleeps for a third of the earlier ttl, which may be longer than the new ttl.
        self._restart_renewal(self.ttl)
        return await self._renew(ANSWER_WITHIN)

    async def until_ended(self) -> None:
        """Wait until the lease is lost or released."""
        await self._ended.wait()

    async def release(self) -> bool | Exception:
        """Release the lease. Return whether it was held to the end, or the error with which the release failed."""
        if self._renewal is not None:
            self._renewal.cancel()
        try:
            answer = await self._release_with_retries()
            # Set only now, because a cancelled release must be repeated.
            self._may_hold = False
            return answer
        finally:
            self._ended.set()
            self._thread.remove_user(self)

    async def _release_with_retries(self) -> bool | Exception:
        """Release the lease. If it was granted, try again for some seconds, because the server may be restarting."""
        pauses = iter(() if self.token is None else RELEASE_RETRY_DELAYS)
        while True:
            try:
                return await self._execute(RELEASE) is not None
            except (DatabaseFailure, OSError) as error:  # noqa: PERF203
                pause = next(pauses, None)
                if pause is None:
                    return error
                await asyncio.sleep(pause)


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
