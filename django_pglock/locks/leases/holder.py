"""One holder of a lease: how it acquires, renews and releases the lease, and how it notices that the lease is lost.

Everything here runs in the event loop of the lease thread and continues without the handle: if the handle is dropped,
``release_unused`` ends it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import uuid4

from django.db import Error as DatabaseFailure

from django_pglock.errors import LockError
from django_pglock.keys import Key
from django_pglock.locks.base_handle import first_line
from django_pglock.locks.leases.statements import ACQUIRE, RELEASE, RENEW, UNDO
from django_pglock.locks.leases.thread import ANSWER_WITHIN, LeaseThread

#: Seconds between two polls of a waiter, if no notification of a release comes.
LEASE_POLL = 1.0
#: Seconds to wait before each further attempt to release a lease.
RELEASE_RETRY_DELAYS = (0.1, 0.5, 2.0)
#: Why a lease was lost whose row says something else than the holder.
TAKEN_AWAY = "the database reports that it was taken away or has another owner"


def boottime() -> float:
    """Return seconds that pass also while the machine sleeps, where the platform can tell."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class LeaseTerms(NamedTuple):
    """What a lease is asked for with. ``ttl`` and ``min_hold`` are in seconds; ``ttl`` None has no end.

    ``steps_down``: the holder gives the lease up at the first renewal that fails.
    """

    ttl: float | None
    min_hold: float
    owner: str
    steps_down: bool


class LeaseHolder:
    """One attempt to hold a lease, from the first question to the release."""

    def __init__(self, lease_thread: LeaseThread, key: Key, using: str, terms: LeaseTerms) -> None:
        #: Set when the lease is lost.
        self.lost = threading.Event()
        #: Why it was lost, if it was.
        self.reason = ""
        self.token: int | None = None
        self.ttl = terms.ttl
        #: Seconds that the acquire took.
        self.waited = 0.0
        self._thread, self._key, self._using, self._terms = lease_thread, key, using, terms
        #: Tells this attempt from all others, in the column ``holder``.
        self._id = uuid4()
        self._deadline: float | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._renewal: asyncio.Task[None] | None = None
        #: Set when the lease is lost or released; None until it is acquired.
        self._ended: asyncio.Event | None = None
        self._acquiring: asyncio.Task[Any] | None = None
        self._is_released = False

    @property
    def is_lost(self) -> bool:
        """Whether the lease cannot be counted on any more. May be asked in any thread."""
        # After a stop of the whole process, a look at the clock here comes before the lease thread's own.
        return self.lost.is_set() or (self._deadline is not None and boottime() >= self._deadline)

    def lose_to_parent(self) -> None:
        """Note that the lease is held by the process from which this one was forked."""
        self.reason = "it is held by the process from which this one was forked"
        # A new event: the lock of the other one may be held by a thread that is not here.
        self.lost = threading.Event()
        self.lost.set()

    # The rest runs in the lease thread's loop

    async def acquire(self, timeout: float | None) -> bool:
        """Acquire the lease; say whether that succeeded within ``timeout`` seconds, None for no limit."""
        self._acquiring = asyncio.current_task()
        self._thread.add_user(self)
        is_granted = False
        try:
            is_granted = await self._wait(timeout)
        finally:
            if not is_granted:
                self._thread.remove_user(self)
        return is_granted

    async def _wait(self, timeout: float | None) -> bool:
        began = time.monotonic()
        while True:
            seconds = await self._try()
            self.waited = time.monotonic() - began
            if self._ended is not None:
                return True
            left = LEASE_POLL if timeout is None else min(LEASE_POLL, timeout - self.waited)
            if left <= 0:
                return False
            if seconds is not None:
                left = min(left, max(seconds, 0.01))
            await self._thread.listener(self._using).wait(self._key.number, left)

    async def _try(self) -> float | None:
        """Ask for the lease once. Returns the seconds until its end, if somebody else holds it."""
        began = boottime()
        try:
            row = await self._ask(ACQUIRE)
        except BaseException:
            # The lease may have been granted all the same, and without a ttl it would be held forever.
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
        """Release a lease whose handle was dropped, or whose acquire was interrupted."""
        if self._acquiring is not None:
            await asyncio.wait({self._acquiring})
        if self._ended is not None and not self._is_released:
            await self.release()

    async def _ask(self, statement: str, *, within: float = ANSWER_WITHIN) -> Any:
        params = {
            "key": self._key.number,
            "name": self._key.name,
            "owner": self._terms.owner,
            "holder": self._id,
            "token": self.token,
            "ttl": None if self.ttl is None else timedelta(seconds=self.ttl),
            "min_hold": timedelta(seconds=self._terms.min_hold),
        }
        return await self._thread.ask(self._using, statement, params, within=within)

    def _set_deadline(self, began: float) -> None:
        """Set the deadline ``ttl`` seconds after the question was sent: the database counts from later on."""
        if self._expiry is not None:
            self._expiry.cancel()
        if self.ttl is None:
            self._deadline = None
            return
        self._deadline = began + self.ttl
        # A timer besides the renewal, because a renewal may take longer than that to fail.
        self._expiry = asyncio.get_running_loop().call_later(
            self._deadline - boottime(), self._lose, f"it could not be renewed for {self.ttl:g} s"
        )

    def _restart_renewal(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
        self._renewal = asyncio.ensure_future(self._renew())

    async def _renew(self) -> None:
        """Renew the lease three times in its ttl, until it is released or lost."""
        spent = 0.0
        while not self.lost.is_set():
            assert self.ttl is not None  # noqa: S101 - only leases that end are renewed
            pause = self.ttl / 3
            # At once after a renewal that got no answer in its time: there is time for one more.
            await asyncio.sleep(max(0.0, pause - spent))
            began = boottime()
            await self._renew_once(pause)
            spent = boottime() - began

    async def _renew_once(self, within: float) -> None:
        began = boottime()
        try:
            row = await self._ask(RENEW, within=within)
        except (DatabaseFailure, LockError, OSError) as error:
            # A leader steps down at the first doubt; another holder has the rest of its time to try again.
            if self._terms.steps_down:
                self._lose(f"it could not be renewed ({first_line(error)})")
            return
        self._note_renewal(row, began)

    def _note_renewal(self, row: Any, began: float) -> bool:
        """Set the new deadline, or note that the lease is lost; say whether it is still held."""
        if row is None:
            self._lose(TAKEN_AWAY)
            return False
        self._set_deadline(began)
        return True

    def _lose(self, reason: str) -> None:
        if not self.lost.is_set():
            self.reason = reason
            self.lost.set()
            if self._ended is not None:
                self._ended.set()

    async def extend(self, seconds: float | None) -> bool:
        """Let the lease last for so many seconds from now on, None for its ttl; say whether it is still held."""
        self.ttl = self.ttl if seconds is None else seconds
        # The task that renews sleeps for a third of the earlier ttl, which may be longer than the new one.
        self._restart_renewal()
        began = boottime()
        return self._note_renewal(await self._ask(RENEW), began)

    async def until_ended(self) -> None:
        """Wait until the lease is lost or released."""
        if self._ended is not None:
            await self._ended.wait()

    async def release(self) -> bool | Exception:
        """Release the lease; say whether it was held to the end, or return the error with which the release failed."""
        for task in (self._renewal, self._expiry):
            if task is not None:
                task.cancel()
        try:
            answer = await self._release_with_retries()
            # Not before: a release that is cancelled has to be repeated.
            self._is_released = True
            return answer
        finally:
            if self._ended is not None:
                self._ended.set()
            self._thread.remove_user(self)

    async def _release_with_retries(self) -> bool | Exception:
        """Try again for some seconds: a server that restarts comes back."""
        pauses = iter(RELEASE_RETRY_DELAYS)
        while True:
            try:
                return await self._ask(RELEASE) is not None
            except (DatabaseFailure, OSError) as error:  # noqa: PERF203
                pause = next(pauses, None)
                if pause is None:
                    return error
                await asyncio.sleep(pause)
