"""Handles of leases, for threads and coroutines. A ``LeaseHolder`` in the lease thread does the work."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from functools import partial

from django.utils.asyncio import async_unsafe

from django_pglock.errors import LockError, model_of
from django_pglock.keys import Key
from django_pglock.locks.handle import BaseHandle, first_line, logger
from django_pglock.locks.leases.holder import LeaseHolder, LeaseTerms
from django_pglock.locks.leases.thread import LeaseThread, lease_thread
from django_pglock.locks.request import Request, Timeout, checked_ttl


class LeaseHandle(BaseHandle):
    """A lease of a thread. True while it counts as held.

    ``token`` is its fencing token. ``lost`` is a ``threading.Event`` that is set when the lease no longer protects. A
    body that runs for long checks it, or calls ``assert_held()``, before each step.
    """

    _noun = "Lease"
    _model = "Lease"

    def __init__(self, key: Key, request: Request, terms: LeaseTerms) -> None:
        super().__init__(request._replace(keys=(key,)))
        self.scope = "lease"
        model_of("Lease")
        self.owner = terms.owner or f"{socket.gethostname()}:{os.getpid()}"
        self._thread = lease_thread()
        self._holder = LeaseHolder(self._thread, key, self.using, terms._replace(owner=self.owner))

    @property
    def is_held(self) -> bool:
        """Whether it counts as held now."""
        return self.is_open and not self._holder.is_lost

    @property
    def token(self) -> int:  # type: ignore[override]
        """The fencing token: it grows with each holder."""
        # A handle without a token is not returned to a user.
        return self._holder.token or 0

    @property
    def lost(self) -> threading.Event:
        """Set when the lease no longer protects."""
        return self._holder.lost

    @async_unsafe("Acquiring a lease blocks the event loop here. Use 'async with', or await its aacquire().")
    def acquire(self, *, may_begin: bool = True) -> LeaseHandle:
        """Acquire the lease. Raises ``LockNotAvailable`` if another holder has it for longer than the timeout."""
        self._free_if_dropped(partial(_release_unused, self._thread, self._holder))
        try:
            self._finish_acquire(self._thread.call(self._holder.acquire(self.request.timeout)))
        except BaseException:
            self.is_open = False
            self._thread.call(self._holder.release_unused())
            self._stop_watch()
            raise
        return self

    def extend(self, ttl: Timeout = None) -> None:
        """Extend the lease to ``ttl`` from now on: seconds or a timedelta; default the ttl that it had.

        Raises ``LockLost`` if it is no longer held, ``LockError`` for a lease without expiry, ``ValueError`` for a ttl
        that is too short.
        """
        seconds = self._seconds_to_extend(ttl)
        self._refuse_unless_extended(self._thread.call(self._holder.extend(seconds)))

    def assert_held(self) -> None:
        """Raise ``LockLost`` if the lease no longer protects. Sends no query."""
        self._reason = self._holder.reason
        super().assert_held()

    def _lost_reason(self) -> str:
        return "" if self.is_held else "it has expired"

    def release(self, error: BaseException | None = None) -> None:
        """Release the lease. ``error`` is the exception of the body, if there is one. Then no other error is raised.

        Raises ``LockLost`` if the lease was lost, and ``LockError`` if it is not held or the release failed.
        """
        self._refuse_unless_held()
        # After a fork, the lease of the parent is already lost here (lose_to_parent).
        self._finish(self._thread.is_inherited or self._thread.call(self._holder.release()), error)

    def free_from_any_thread(self) -> None:
        self.is_open = False
        _release_unused(self._thread, self._holder)
        self._stop_watch()

    # What both kinds of handles share

    def _finish_acquire(self, is_granted: bool) -> None:
        self.waited = self._holder.waited
        if not is_granted:
            raise self._busy_error(None)
        self._announce_acquired()

    def _refuse_unless_held(self) -> None:
        if not self.is_open:
            raise self._error(LockError, "is not held")

    def _seconds_to_extend(self, ttl: Timeout) -> float | None:
        seconds = checked_ttl(ttl)
        if self._thread.is_inherited:
            raise self._lost_error(self._holder.reason)
        if self._holder.ttl is None:
            raise self._error(LockError, "has no ttl, so it cannot be extended")
        self.assert_held()
        return seconds

    def _refuse_unless_extended(self, is_held: bool) -> None:
        if not is_held:
            raise self._lost_error(self._holder.reason)

    def _finish(self, was_ours: bool | Exception, error: BaseException | None) -> None:
        """Report the result of the release. ``error`` is the body's exception, which no other error replaces."""
        # Set only now: if an exception interrupts the release, the handle stays open, and the lease is released when
        # the handle is dropped.
        self.is_open = False
        self._stop_watch()
        if isinstance(was_ours, Exception):
            failed = self._failed(was_ours)
            if error is None:
                raise failed from was_ours
            logger.error("%s", failed)
        elif not was_ours or self.lost.is_set():
            self._report_lost(self._holder.reason or "the database reports that it has expired", error)
        self._announce_released()

    def _failed(self, error: Exception) -> LockError:
        ttl = self._holder.ttl
        consequence = (
            "stays held until it is freed with: manage.py locks --free-lease NAME"
            if ttl is None
            else f"expires within {ttl:g} s"
        )
        return self._error(LockError, f"could not be released ({first_line(error)}); it {consequence}")


def _release_unused(thread: LeaseThread, holder: LeaseHolder) -> None:
    if not thread.is_inherited:
        thread.start(holder.release_unused())


class AsyncLeaseHandle(LeaseHandle):
    """A lease that a coroutine holds. The event loop never waits for the database."""

    async def acquire(self) -> AsyncLeaseHandle:  # type: ignore[override]
        """Acquire the lease; as ``LeaseHandle.acquire``."""
        self._free_if_dropped(partial(_release_unused, self._thread, self._holder))
        try:
            self._finish_acquire(await self._thread.acall(self._holder.acquire(self.request.timeout)))
        except BaseException:
            self.is_open = False
            await asyncio.shield(self._thread.acall(self._holder.release_unused()))
            self._stop_watch()
            raise
        return self

    async def extend(self, ttl: Timeout = None) -> None:  # type: ignore[override]
        """Extend the lease to ``ttl`` from now on; as ``LeaseHandle.extend``."""
        seconds = self._seconds_to_extend(ttl)
        self._refuse_unless_extended(await self._thread.acall(self._holder.extend(seconds)))

    async def until_lost(self) -> None:
        """Wait until the lease is lost or released."""
        if not self._thread.is_inherited:
            await self._thread.acall(self._holder.until_ended())

    async def release(self, error: BaseException | None = None) -> None:  # type: ignore[override]
        """Release the lease; as ``LeaseHandle.release``."""
        self._refuse_unless_held()
        self._finish(self._thread.is_inherited or await self._thread.acall(self._holder.release()), error)
