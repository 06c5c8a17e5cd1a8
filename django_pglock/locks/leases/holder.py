"""One holder's time with a lease: how it is taken, renewed, noticed when lost, and given back.

Everything here runs in the keeper's event loop, and goes on without the handle: if that is dropped, ``forget`` ends it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from django.db import Error as DatabaseFailure

from django_pglock.errors import LockError
from django_pglock.keys import Key
from django_pglock.locks.base_handle import first_line
from django_pglock.locks.leases.thread import ANSWER_WITHIN, CHANNEL

if TYPE_CHECKING:
    from django_pglock.locks.leases.thread import LeaseThread

TABLE = '"django_pglock_lease"'
#: A lease that nobody has is one that has come to its end; giving it back brings the end on. Without a ttl there is
#: none. The second SELECT tells who is late for how long it is worth waiting.
ACQUIRE = f"""
WITH taken AS (
    INSERT INTO {TABLE} AS l (key, name, owner, holder, token, ttl, acquired_at, renewed_at, expires_at)
    SELECT %(key)s, %(name)s, %(owner)s, %(holder)s, 1, %(ttl)s::interval, t, t,
        t + %(ttl)s::interval
    FROM (SELECT clock_timestamp() AS t) AS n
    ON CONFLICT (key) DO UPDATE SET name = EXCLUDED.name, owner = EXCLUDED.owner, holder = EXCLUDED.holder,
        token = l.token + 1, ttl = EXCLUDED.ttl, acquired_at = EXCLUDED.acquired_at, renewed_at = EXCLUDED.renewed_at,
        expires_at = EXCLUDED.expires_at, released_at = NULL
    WHERE l.expires_at <= clock_timestamp()
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
#: A lease that is given back may be kept from others until it has been held for long enough.
RELEASE = f"""
WITH freed AS (
    UPDATE {TABLE} SET released_at = clock_timestamp(),
        expires_at = greatest(clock_timestamp(), acquired_at + %(min_hold)s::interval)
    WHERE {OURS} AND (expires_at IS NULL OR expires_at > clock_timestamp()) RETURNING key)
SELECT key, pg_notify('{CHANNEL}', key::text) FROM freed
"""
#: After an answer that was lost. The holder's number is this attempt's alone.
UNDO = f"UPDATE {TABLE} SET released_at = clock_timestamp(), expires_at = clock_timestamp() WHERE holder = %(holder)s"
#: Seconds after which a waiter looks again, if nothing was heard.
POLL_INTERVAL = 1.0
#: Seconds to wait before each further attempt to give a lease back.
RELEASE_RETRY_DELAYS = (0.1, 0.5, 2.0)
#: Why a lease was lost that the database knows nothing of any more.
TAKEN_AWAY = "the database says that it is somebody else's or was taken away"


def boottime() -> float:
    """Return seconds that pass also while the machine sleeps, where the platform can tell."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class LeaseTerms:
    """For how long a lease is, for how long at least, whose, and whether its holder steps down at the first doubt."""

    def __init__(self, *, ttl: float | None, min_hold: float, owner: str, steps_down: bool) -> None:
        self.ttl = ttl
        self.min_hold = min_hold
        self.owner = owner
        self.steps_down = steps_down


class LeaseHolder:
    """One attempt to get a lease, and what comes of it."""

    def __init__(self, lease_thread: LeaseThread, key: Key, using: str, owner: str, terms: LeaseTerms) -> None:
        self.lease_thread = lease_thread
        self.lost = threading.Event()
        #: Why it was lost, if it was.
        self.reason = ""
        self.token: int | None = None
        self.ttl = terms.ttl
        #: Seconds that it took to get it.
        self.waited = 0.0
        self._key, self._using, self._owner, self._terms = key, using, owner, terms
        self._holder = uuid4()
        self._deadline: float | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._renewing: asyncio.Task[None] | None = None
        #: Set when it is over; None until it is taken.
        self._ended: asyncio.Event | None = None
        self._acquiring: asyncio.Task[Any] | None = None
        self._is_released = False

    @property
    def is_over(self) -> bool:
        """Whether it cannot be counted on any more. For every thread."""
        # A process that was stopped looks at the clock here before its keeper gets to it.
        return self.lost.is_set() or (self._deadline is not None and boottime() >= self._deadline)

    def lose_to_parent(self) -> None:
        """Note that it is held by the process from which this one was forked."""
        self.reason = "it is held by the process from which this one was forked"
        # A new one: the other may be locked by a thread that is not here.
        self.lost = threading.Event()
        self.lost.set()

    # The rest runs in the keeper's loop

    async def acquire(self, timeout: float | None) -> bool:
        """Take the lease; say whether it was to be had in so many seconds, None for without limit."""
        self._acquiring = asyncio.current_task()
        self.lease_thread.add_user(self)
        is_granted = False
        try:
            is_granted = await self._wait_for_it(timeout)
        finally:
            if not is_granted:
                self.lease_thread.remove_user(self)
        return is_granted

    async def _wait_for_it(self, timeout: float | None) -> bool:
        began = time.monotonic()
        while True:
            seconds = await self._try_once()
            self.waited = time.monotonic() - began
            if self._ended is not None:
                return True
            left = POLL_INTERVAL if timeout is None else min(POLL_INTERVAL, timeout - self.waited)
            if left <= 0:
                return False
            if seconds is not None:
                left = min(left, max(seconds, 0.01))
            await self.lease_thread.listener(self._using).wait(self._key.number, left)

    async def _try_once(self) -> float | None:
        """Ask for the lease once. Returns in how many seconds it comes to its end, if it is somebody else's."""
        began = boottime()
        try:
            row = await self._ask(ACQUIRE)
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
            self._ended = asyncio.Event()
            self._set_deadline(began)
            if self.ttl is not None:
                self._restart_renewal()
        return seconds

    async def _undo(self) -> None:
        try:
            await asyncio.shield(self._ask(UNDO))
        except DatabaseFailure:
            return

    async def release_unused(self) -> None:
        """Give back what was taken for somebody who is not there any more, or was interrupted and knows nothing."""
        if self._acquiring is not None:
            await asyncio.wait({self._acquiring})
        if self._ended is not None and not self._is_released:
            await self.release()

    async def _ask(self, statement: str, *, within: float = ANSWER_WITHIN) -> Any:
        params = {
            "key": self._key.number,
            "name": self._key.name,
            "owner": self._owner,
            "holder": self._holder,
            "token": self.token,
            "ttl": None if self.ttl is None else timedelta(seconds=self.ttl),
            "min_hold": timedelta(seconds=self._terms.min_hold),
        }
        return await self.lease_thread.ask(self._using, statement, params, within=within)

    def _set_deadline(self, began: float) -> None:
        """Count the time from before the question: the database answered later, and by its clock."""
        if self._alarm is not None:
            self._alarm.cancel()
        if self.ttl is None:
            self._deadline = None
            return
        self._deadline = began + self.ttl
        # An alarm of its own, for a question may take longer than that to fail.
        self._alarm = asyncio.get_running_loop().call_later(
            self._deadline - boottime(), self._lose, f"it could not be renewed for {self.ttl:g} s"
        )

    def _restart_renewal(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        self._renewing = asyncio.ensure_future(self._renew())

    async def _renew(self) -> None:
        """Renew it three times in its time, until it is given back or lost."""
        spent = 0.0
        while not self.lost.is_set():
            assert self.ttl is not None  # noqa: S101 - only leases that end are renewed
            pause = self.ttl / 3
            # At once when the last one waited in vain: there is time for one more.
            await asyncio.sleep(max(0.0, pause - spent))
            began = boottime()
            await self._renew_once(pause)
            spent = boottime() - began

    async def _renew_once(self, patience: float) -> None:
        began = boottime()
        try:
            row = await self._ask(RENEW, within=patience)
        except (DatabaseFailure, LockError, OSError) as error:
            # Who leads steps down at the first doubt; others have the rest of their time to try again.
            if self._terms.steps_down:
                self._lose(f"it could not be renewed ({first_line(error)})")
            return
        if row is None:
            self._lose(TAKEN_AWAY)
        else:
            self._set_deadline(began)

    def _lose(self, reason: str) -> None:
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()
            if self._ended is not None:
                self._ended.set()

    async def extend(self, seconds: float | None) -> bool:
        """Let it last for so many seconds from now on, None for as long as before; say whether it is held yet."""
        self.ttl = self.ttl if seconds is None else seconds
        # The task that renews it sleeps for a third of the time as it was, which may be more than there is now.
        self._restart_renewal()
        began = boottime()
        if await self._ask(RENEW) is None:
            self._lose(TAKEN_AWAY)
            return False
        self._set_deadline(began)
        return True

    async def until_ended(self) -> None:
        """Wait until it cannot be counted on any more, or is given back."""
        if self._ended is not None:
            await self._ended.wait()

    async def release(self) -> bool | Exception:
        """Give it back; say whether it was ours to the end, or return the error with which that cannot be done."""
        self._is_released = True
        for task in (self._renewing, self._alarm):
            if task is not None:
                task.cancel()
        try:
            return await self._release_with_retries()
        finally:
            if self._ended is not None:
                self._ended.set()
            self.lease_thread.remove_user(self)

    async def _release_with_retries(self) -> bool | Exception:
        """Ask again for some seconds: a server that restarts comes back."""
        pauses = iter(RELEASE_RETRY_DELAYS)
        while True:
            try:
                return await self._ask(RELEASE) is not None
            except (DatabaseFailure, OSError) as error:  # noqa: PERF203
                pause = next(pauses, None)
                if pause is None:
                    return error
                await asyncio.sleep(pause)
