"""One holder of a lease: how it acquires, renews and releases the lease, and how it notices that the lease is lost.

All of this runs in the event loop of the lease thread, also after the handle was dropped. Then ``release_unused``
releases the lease.
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
from django_pglock.locks.handle import first_line
from django_pglock.locks.leases.statements import ACQUIRE, RELEASE, RENEW, UNDO
from django_pglock.locks.leases.thread import ANSWER_WITHIN, LeaseThread

#: Seconds between two polls of a waiter, if no notification of a release comes.
LEASE_POLL = 1.0
#: Seconds to wait before each further attempt to release a lease.
RELEASE_RETRY_DELAYS = (0.1, 0.5, 2.0)
#: The reason if the row of a lease has another state than the holder expects.
REVOKED = "the database reports that it was revoked or has another owner"


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


class LeaseHolder:
    """One attempt to hold a lease, from the first statement to the release."""

    def __init__(self, lease_thread: LeaseThread, key: Key, using: str, terms: LeaseTerms) -> None:
        #: Set when the lease is lost.
        self.lost = threading.Event()
        #: Why the lease was lost, if it was.
        self.reason = ""
        self.token: int | None = None
        self.ttl = terms.ttl
        #: Seconds that the acquire took.
        self.waited = 0.0
        self._thread, self._key, self._using, self._terms = lease_thread, key, using, terms
        #: The unique id of this attempt, in the column ``holder``.
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
        """Whether the lease no longer protects. Thread-safe."""
        # The clock is checked here as well: after a stop of the process, this may run before the lease thread does.
        return self.lost.is_set() or (self._deadline is not None and boottime() >= self._deadline)

    def lose_to_parent(self) -> None:
        """Note that the lease belongs to the parent process from which this one was forked."""
        self.reason = "it is held by the process from which this one was forked"
        # A new event, because the old one may be locked by a thread that does not exist in this process.
        self.lost = threading.Event()
        self.lost.set()

    # The following methods run in the lease thread's loop

    async def acquire(self, timeout: float | None) -> bool:
        """Acquire the lease. Return whether that succeeded within ``timeout`` seconds (None: no limit)."""
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
        """Try to acquire the lease once. If another holder has it, return the seconds until its expiry."""
        began = boottime()
        try:
            row = await self._execute(ACQUIRE)
        except BaseException:
            # The lease may have been granted nevertheless, and without a ttl it would be held forever.
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
            await asyncio.shield(self._execute(UNDO))
        except DatabaseFailure:
            return

    async def release_unused(self) -> None:
        """Release a lease whose handle was dropped, or whose acquire was interrupted."""
        if self._acquiring is not None:
            await asyncio.wait({self._acquiring})
        if self._ended is not None and not self._is_released:
            await self.release()

    async def _execute(self, statement: str, *, within: float = ANSWER_WITHIN) -> Any:
        params = {
            "key": self._key.number,
            "name": self._key.name,
            "owner": self._terms.owner,
            "holder": self._id,
            "token": self.token,
            "ttl": None if self.ttl is None else timedelta(seconds=self.ttl),
            "min_hold": timedelta(seconds=self._terms.min_hold),
        }
        return await self._thread.execute(self._using, statement, params, within=within)

    def _set_deadline(self, began: float) -> None:
        """Set the deadline to ``ttl`` seconds after the statement was sent. The database counts from a later moment."""
        if self._expiry is not None:
            self._expiry.cancel()
        if self.ttl is None:
            self._deadline = None
            return
        self._deadline = began + self.ttl
        # A timer in addition to the renewal, because a renewal may take longer than this to fail.
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
            # After a renewal without an answer there is no pause, because there is time for one more attempt.
            await asyncio.sleep(max(0.0, pause - spent))
            began = boottime()
            await self._renew_once(pause)
            spent = boottime() - began

    async def _renew_once(self, within: float) -> None:
        began = boottime()
        try:
            row = await self._execute(RENEW, within=within)
        except (DatabaseFailure, LockError, OSError) as error:
            # A leader steps down at the first error. Any other holder can try again until the deadline.
            if self._terms.steps_down:
                self._lose(f"it could not be renewed ({first_line(error)})")
            return
        self._note_renewal(row, began)

    def _note_renewal(self, row: Any, began: float) -> bool:
        """Set the new deadline, or note that the lease is lost. Return whether it is still held."""
        if row is None:
            self._lose(REVOKED)
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
        """Extend the lease to ``seconds`` from now on (None: its ttl). Return whether it is still held."""
        self.ttl = self.ttl if seconds is None else seconds
        # The task for renewals sleeps for a third of the earlier ttl, which may be longer than the new ttl.
        self._restart_renewal()
        began = boottime()
        return self._note_renewal(await self._execute(RENEW), began)

    async def until_ended(self) -> None:
        """Wait until the lease is lost or released."""
        if self._ended is not None:
            await self._ended.wait()

    async def release(self) -> bool | Exception:
        """Release the lease. Return whether it was held to the end, or the error with which the release failed."""
        for task in (self._renewal, self._expiry):
            if task is not None:
                task.cancel()
        try:
            answer = await self._release_with_retries()
            # Set only now, because a cancelled release must be repeated.
            self._is_released = True
            return answer
        finally:
            if self._ended is not None:
                self._ended.set()
            self._thread.remove_user(self)

    async def _release_with_retries(self) -> bool | Exception:
        """Release the lease. Try again for some seconds, because the server may be restarting."""
        pauses = iter(RELEASE_RETRY_DELAYS)
        while True:
            try:
                return await self._execute(RELEASE) is not None
            except (DatabaseFailure, OSError) as error:  # noqa: PERF203
                pause = next(pauses, None)
                if pause is None:
                    return error
                await asyncio.sleep(pause)
