"""Leases: locks that live in a row, with an owner, an end and a fencing token.

An advisory lock ends with its database session. A lease ends when its time is over, whatever happens to sessions,
servers and networks: it survives a restart and a failover, and works behind every pooler. The price is that its holder
may be stopped for longer than the lease lasts and go on, believing that it still has it. No lock service can prevent
that. The token can: it grows with each holder, and whoever is written to accepts no smaller one than it has seen
(Kleppmann, "How to do distributed locking", 2016).

All times are the database's; clocks of hosts may be wrong.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any
from uuid import uuid4

from django.db import Error as DatabaseFailure
from django.utils.asyncio import async_unsafe

from django_pglock.errors import LockError, LockKeyError
from django_pglock.keys import Key, make_key, sha256_key
from django_pglock.locks.holding import Holding, first_line
from django_pglock.locks.keeper import CHANNEL, Keeper, keeper
from django_pglock.locks.lockable import Lockable
from django_pglock.locks.options import OnBusy, Options, Timeout, seconds_of

TABLE = '"django_pglock_lease"'
#: A lease that nobody has is one that has come to its end; giving it back brings the end on. Without a ttl there is
#: none. The second SELECT tells who is late for how long it is worth waiting.
TAKE = f"""
WITH taken AS (
    INSERT INTO {TABLE} AS l (key, name, owner, holder, token, ttl, acquired_at, renewed_at, expires_at)
    SELECT %(key)s, %(name)s, %(owner)s, %(holder)s, 1, %(ttl)s, t, t, t + %(ttl)s FROM (SELECT clock_timestamp() AS t) AS n
    ON CONFLICT (key) DO UPDATE SET name = EXCLUDED.name, owner = EXCLUDED.owner, holder = EXCLUDED.holder,
        token = l.token + 1, ttl = EXCLUDED.ttl, acquired_at = EXCLUDED.acquired_at, renewed_at = EXCLUDED.renewed_at,
        expires_at = EXCLUDED.expires_at, released_at = NULL
    WHERE l.expires_at <= clock_timestamp()
    RETURNING token)
SELECT token, NULL::float AS seconds FROM taken
UNION ALL
SELECT NULL, extract(epoch FROM expires_at - clock_timestamp()) FROM {TABLE}
WHERE key = %(key)s AND NOT EXISTS (SELECT FROM taken)
"""  # noqa: E501
OURS = "key = %(key)s AND holder = %(holder)s AND token = %(token)s AND released_at IS NULL"
RENEW = f"""
UPDATE {TABLE} SET renewed_at = clock_timestamp(), expires_at = clock_timestamp() + %(ttl)s, ttl = %(ttl)s
WHERE {OURS} AND expires_at > clock_timestamp() RETURNING token
"""
#: A lease that is given back may be kept from others until it has been held for long enough.
GIVE_BACK = f"""
WITH freed AS (
    UPDATE {TABLE} SET released_at = clock_timestamp(),
        expires_at = greatest(clock_timestamp(), acquired_at + %(min_hold)s)
    WHERE {OURS} AND (expires_at IS NULL OR expires_at > clock_timestamp()) RETURNING key)
SELECT key, pg_notify('{CHANNEL}', key::text) FROM freed
"""
#: After an answer that was lost. The holder's number is this attempt's alone.
UNDO = f"UPDATE {TABLE} SET released_at = clock_timestamp(), expires_at = clock_timestamp() WHERE holder = %(holder)s"
#: Seconds after which a waiter looks again, if nothing was heard.
LOOK_AGAIN = 1.0
#: Seconds to wait before each further attempt to give a lease back.
GIVE_BACK_AGAIN = (0.1, 0.5, 2.0)


class LeaseHandle(Holding):
    """A lease that is held. True while it counts as held.

    ``token`` is its fencing token. ``lost`` is a ``threading.Event`` that is set when the lease cannot be counted on
    any more; a body that runs for long looks at it, or calls ``assert_held()`` before each step.
    """

    # Nobody is given a handle that has none yet.
    token: int
    _model = "Lease"

    def __init__(self, key: Key, options: Options, terms: Terms) -> None:
        super().__init__([key], options)
        self.scope = "lease"
        self.lost = threading.Event()
        self.owner = terms.owner or f"{socket.gethostname()}:{os.getpid()}"
        self._terms = terms
        self._ttl = terms.ttl
        self._holder = uuid4()
        self._deadline: float | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._renewing: asyncio.Task[None] | None = None
        #: Set when it is over; None until it is taken.
        self._gone: asyncio.Event | None = None
        self._taking: asyncio.Task[Any] | None = None
        self._keeper: Keeper = keeper()

    def __bool__(self) -> bool:
        return self.is_held and not self._is_over()

    @async_unsafe("Taking a lease stops the event loop here. Use 'async with', or await its aacquire().")
    def acquire(self, *, may_begin: bool = True) -> LeaseHandle:
        """Take the lease. Raises ``LockNotAvailable`` when it is taken for longer than the timeout."""
        try:
            is_granted = self._keeper.call(self._acquire())
        except BaseException:
            self._keeper.call(self._forget())
            raise
        self._note(is_granted)
        return self

    def extend(self, ttl: Timeout = None) -> None:
        """Let the lease last for ``ttl`` from now on (default: as long as before).

        Raises ``LockLost`` when it is not held any more, ``ValueError`` for a ttl that is too short.
        """
        self._refuse_if_inherited()
        self._keeper.call(self._extend(ttl))

    def assert_held(self) -> None:
        """Raise ``LockLost`` if the lease cannot be counted on any more. Asks the server nothing."""
        self._refuse_if_given_back()
        if not self.is_held or self._is_over():
            raise self._lost(self._reason or "it has come to its end")

    def release(self, error: BaseException | None = None) -> None:
        """Give the lease back. Raises ``LockLost`` unless ``error`` is what the body raised."""
        self._refuse_unless_held()
        self._finish(not self._keeper.is_left_behind and self._keeper.call(self._give_back()), error)

    # What both kinds of handle do here

    def _note(self, is_granted: bool) -> None:
        if not is_granted:
            raise self._note_busy()
        self._note_taken()

    def _refuse_unless_held(self) -> None:
        if not self.is_held:
            raise LockError(f"Lease {self.name!r} is not held.", name=self.name, key=self.key)
        self.is_held = False

    def leave_to_parent(self) -> None:
        """Note that it is held by the process from which this one was forked."""
        self._reason = "it is held by the process from which this one was forked"
        # A new one: the other may be locked by a thread that is not here.
        self.lost = threading.Event()
        self.lost.set()

    def _refuse_if_inherited(self) -> None:
        if self._keeper.is_left_behind:
            raise self._lost(self._reason)

    def _finish(self, was_ours: bool, error: BaseException | None) -> None:
        if not was_ours or self.lost.is_set():
            self._note_lost(self._reason or "the database says that it has come to its end", error)
        self._note_given_back()

    def _is_over(self) -> bool:
        # A process that was stopped looks at the clock here before its keeper gets to it.
        return self.lost.is_set() or (self._deadline is not None and time.monotonic() >= self._deadline)

    # What happens in the keeper's loop

    async def _acquire(self) -> bool:
        self._taking = asyncio.current_task()
        self._keeper.come(self)
        is_granted = False
        try:
            is_granted = await self._wait_for_it()
        finally:
            if not is_granted:
                self._keeper.go(self)
        return is_granted

    async def _wait_for_it(self) -> bool:
        began = time.monotonic()
        timeout = self.options.timeout
        while True:
            seconds = await self._try()
            self.waited = time.monotonic() - began
            if self._gone is not None:
                return True
            left = LOOK_AGAIN if timeout is None else min(LOOK_AGAIN, timeout - self.waited)
            if left <= 0:
                return False
            if seconds is not None:
                left = min(left, max(seconds, 0.01))
            await self._keeper.bell(self.using).wait(self.key, left)

    async def _try(self) -> float | None:
        """Ask for the lease once. Returns in how many seconds it comes to its end, if it is somebody else's."""
        began = time.monotonic()
        try:
            row = await self._ask(TAKE)
        except BaseException:
            # It may be ours all the same, and without a ttl it would be for ever.
            await self._undo()
            raise
        if row is None:
            return 0.0
        token: int | None
        seconds: float | None
        token, seconds = row
        if token is not None:
            self.token = token
            self._gone = asyncio.Event()
            self._set_deadline(began)
            if self._ttl is not None:
                self._renew_from_now_on()
        return seconds

    async def _undo(self) -> None:
        try:
            await asyncio.shield(self._ask(UNDO))
        except DatabaseFailure:
            return

    async def _forget(self) -> None:
        """Give back what was taken for somebody who was interrupted in the very moment and does not know of it."""
        if self._taking is not None:
            await asyncio.wait({self._taking})
        if self._gone is not None:
            await self._give_back()

    async def _ask(self, statement: str) -> Any:
        params = {
            "key": self.key,
            "name": self.name,
            "owner": self.owner,
            "holder": self._holder,
            "token": self.token,
            "ttl": None if self._ttl is None else timedelta(seconds=self._ttl),
            "min_hold": timedelta(seconds=self._terms.min_hold),
        }
        return await self._keeper.ask(self.using, statement, params)

    def _set_deadline(self, began: float) -> None:
        """Count the time from before the question: the database answered later, and by its clock."""
        if self._alarm is not None:
            self._alarm.cancel()
        if self._ttl is None:
            self._deadline = None
            return
        self._deadline = began + self._ttl
        # An alarm of its own, for a question may take longer than that to fail.
        self._alarm = asyncio.get_running_loop().call_later(
            self._deadline - time.monotonic(), self._lose, f"it could not be renewed for {self._ttl:g} s"
        )

    def _renew_from_now_on(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        self._renewing = asyncio.ensure_future(self._renew())

    async def _renew(self) -> None:
        """Renew it three times in its time, until it is given back or lost."""
        while not self.lost.is_set():
            assert self._ttl is not None  # noqa: S101 - only leases that end are renewed
            pause = self._ttl / 3
            await asyncio.sleep(pause)
            await self._renew_once(pause)

    async def _renew_once(self, patience: float) -> None:
        began = time.monotonic()
        try:
            row = await asyncio.wait_for(self._ask(RENEW), patience)
        except (DatabaseFailure, LockError, OSError, asyncio.TimeoutError) as error:
            # Who leads steps down at the first doubt; others have the rest of their time to try again.
            if self._terms.steps_down:
                self._lose(f"it could not be renewed ({first_line(error)})")
            return
        if row is None:
            self._lose("the database says that it is somebody else's or was taken away")
        else:
            self._set_deadline(began)

    def _lose(self, reason: str) -> None:
        if not self.lost.is_set():
            self._reason = reason
            self.lost.set()
            if self._gone is not None:
                self._gone.set()

    async def _extend(self, ttl: Timeout) -> None:
        seconds = _ttl_of(ttl)
        if self._ttl is None:
            raise LockError(f"Lease {self.name!r} has no end to put off.", name=self.name, key=self.key)
        self.assert_held()
        self._ttl = self._ttl if seconds is None else seconds
        # Who renews it sleeps for a third of the time as it was, which may be more than there is now.
        self._renew_from_now_on()
        began = time.monotonic()
        if await self._ask(RENEW) is None:
            self._lose("the database says that it is somebody else's or was taken away")
            raise self._lost(self._reason)
        self._set_deadline(began)

    async def _give_back(self) -> bool:
        """Give it back; say whether it was ours to the end."""
        for task in (self._renewing, self._alarm):
            if task is not None:
                task.cancel()
        try:
            return await self._give_back_patiently()
        finally:
            if self._gone is not None:
                self._gone.set()
            self._keeper.go(self)

    async def _give_back_patiently(self) -> bool:
        """Ask again for some seconds: a server that restarts comes back."""
        pauses = iter(GIVE_BACK_AGAIN)
        while True:
            try:
                return await self._ask(GIVE_BACK) is not None
            except (DatabaseFailure, OSError) as error:  # noqa: PERF203
                pause = next(pauses, None)
                if pause is None:
                    raise self._cannot_give_back(error) from error
                await asyncio.sleep(pause)

    def _cannot_give_back(self, error: Exception) -> LockError:
        rest = "has to be freed by hand" if self._ttl is None else f"ends by itself within {self._ttl:g} s"
        text = f"Lease {self.name!r} could not be given back ({first_line(error)}); it {rest}."
        return LockError(text, name=self.name, key=self.key)


class AsyncLeaseHandle(LeaseHandle):
    """A lease that a coroutine holds. The event loop never waits for the database."""

    async def acquire(self) -> AsyncLeaseHandle:  # type: ignore[override]
        """Take the lease; as ``LeaseHandle.acquire``."""
        try:
            is_granted = await self._keeper.acall(self._acquire())
        except BaseException:
            await asyncio.shield(self._keeper.acall(self._forget()))
            raise
        self._note(is_granted)
        return self

    async def extend(self, ttl: Timeout = None) -> None:  # type: ignore[override]
        """Let the lease last for ``ttl`` from now on; as ``LeaseHandle.extend``."""
        self._refuse_if_inherited()
        await self._keeper.acall(self._extend(ttl))

    async def until_lost(self) -> None:
        """Wait until the lease cannot be counted on any more, or is given back."""
        if self._gone is not None and not self._keeper.is_left_behind:
            await self._keeper.acall(self._gone.wait())

    async def release(self, error: BaseException | None = None) -> None:  # type: ignore[override]
        """Give the lease back; as ``LeaseHandle.release``."""
        self._refuse_unless_held()
        self._finish(not self._keeper.is_left_behind and await self._keeper.acall(self._give_back()), error)


class Terms:
    """For how long a lease is, for how long at least, whose, and whether its holder steps down at the first doubt."""

    def __init__(self, *, ttl: float | None, min_hold: float, owner: str, steps_down: bool) -> None:
        self.ttl = ttl
        self.min_hold = min_hold
        self.owner = owner
        self.steps_down = steps_down


class Lease(Lockable[LeaseHandle, AsyncLeaseHandle]):
    """Hold a named lease: ``with Lease("nightly", ttl=60) as lease: ...``, or decorate a function with it.

    - ``parts``: the name, or its parts, or a decorator's template; as for ``lock``.
    - ``ttl``: seconds or a timedelta after which the lease ends unless it is renewed, which happens by itself three
      times in that time for as long as the process lives. None: it has no end (a mutex), and after a crash it has to
      be freed by hand, in the admin.
    - ``min_hold``: seconds or a timedelta for which others are kept out, even if it is given back earlier. For jobs
      that several hosts start at the same time by clocks that differ.
    - ``timeout``: seconds or a timedelta to wait; default 0 does not wait, None waits without limit.
    - ``owner``: who it is, for people who look; default the host and the process.
    - ``using``: database alias; default from the setting ``USING``.
    - ``on_busy``: what a decorated call does when the lease is taken; as for ``lock``.

    The lease is taken, renewed and given back on a database session of its own, so it is independent of any
    ``atomic()`` block. The handle has ``token``, ``lost``, ``extend(ttl)`` and ``assert_held()``.

    Raises ``LockNotAvailable`` when it is taken, ``LockLost`` at the end if it was lost, ``LockKeyError`` for a bad
    name, ``ValueError`` for a bad time, ``owner`` or ``on_busy``.
    """

    _steps_down = False

    def __init__(
        self,
        *parts: Any,
        ttl: Timeout = None,
        min_hold: Timeout = 0,
        timeout: Timeout = 0,
        owner: str = "",
        using: str | None = None,
        on_busy: OnBusy = "raise",
    ) -> None:
        super().__init__(parts, on_busy)
        seconds = _ttl_of(ttl)
        if not isinstance(owner, str) or "\x00" in owner or any("\ud800" <= each <= "\udfff" for each in owner):
            raise ValueError(f"owner is {owner!r}; give a text without NUL and lone surrogates, which no row holds.")
        self._options = Options(timeout=seconds_of(timeout), using=using)
        self._terms = Terms(
            ttl=seconds,
            min_hold=seconds_of(min_hold, name="min_hold") or 0.0,
            owner=owner,
            steps_down=self._steps_down,
        )

    def _handle(self, parts: tuple[Any, ...]) -> LeaseHandle:
        return LeaseHandle(_key(parts), self._options, self._terms)

    def _async_handle(self, parts: tuple[Any, ...]) -> AsyncLeaseHandle:
        return AsyncLeaseHandle(_key(parts), self._options, self._terms)


#: Three renewals, each with a round trip to the database, must have room in it.
SHORTEST_TTL = 0.3


class leader(Lease):  # noqa: N801 - reads like lock
    """Be the only leader of this name: ``with leader("scheduler") as leadership: ...`` waits until elected.

    A lease with three differences: it waits by default; the next one is woken at once when the leader resigns (leaves
    the block); and any renewal that fails makes the leader step down, long before the lease ends and another one can
    be elected. Look at ``leadership.lost``, or call ``assert_held()``, before each step of work::

        with leader("scheduler", ttl=15) as leadership:
            while not leadership.lost.wait(1):
                schedule(fence=leadership.token)

    Arguments as for ``Lease``; ``ttl`` is 15 seconds by default, ``timeout`` None.
    """

    _steps_down = True

    def __init__(
        self,
        *parts: Any,
        ttl: Timeout = 15.0,
        timeout: Timeout = None,
        owner: str = "",
        using: str | None = None,
        on_busy: OnBusy = "raise",
    ) -> None:
        if ttl is None:
            raise ValueError("A leader needs a ttl: without one, nobody could follow a leader that died.")
        super().__init__(*parts, ttl=ttl, timeout=timeout, owner=owner, using=using, on_busy=on_busy)


def _ttl_of(ttl: Timeout) -> float | None:
    seconds = seconds_of(ttl, name="ttl")
    if seconds is not None and seconds < SHORTEST_TTL:
        raise ValueError(f"ttl is {ttl!r}; give at least {SHORTEST_TTL} s.")
    return seconds


def _key(parts: tuple[Any, ...]) -> Key:
    # Not by KEY_FUNCTION, which is for sharing advisory locks with other packages; leases are ours alone.
    name = make_key(*parts).name
    if "\x00" in name:
        raise LockKeyError(f"{name!r} contains a NUL character, which no row can hold; a lease's name stands in one.")
    return Key(name, sha256_key(name))
