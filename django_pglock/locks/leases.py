"""Leases: locks in a row of a table, with an owner, an expiry and a fencing token.

An advisory lock ends with its database session. A lease ends when its time is over, whatever happens to sessions,
servers and networks. It survives a restart and a failover, and works behind each pooler. The price: a holder may be
stopped for longer than the lease lasts, and then continue as if it still held the lease. A lock service cannot prevent
this, but a fencing token can. The token grows with each holder, and the service that the holder writes to must refuse a
token that is smaller than the largest one it has seen (Kleppmann, "How to do distributed locking", 2016).

All times are the database's, because the clocks of hosts may be wrong.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from django.utils.asyncio import async_unsafe

from django_pglock.errors import LockError, LockKeyError, model_of
from django_pglock.keys import Key, make_key, sha256_key
from django_pglock.locks.base_handle import BaseHandle, first_line, logger
from django_pglock.locks.lease_thread import LeaseHolder, LeaseTerms, LeaseThread, lease_thread
from django_pglock.locks.lock import Lock
from django_pglock.locks.request import OnBusy, Request, Timeout, checked_ttl, request_of, to_seconds

__all__ = ["Lease", "leader"]


class Lease(Lock):
    """Hold a named lease: ``with Lease("nightly", ttl=60) as lease: ...``, or decorate a function with it.

    - ``parts``: the name, or its parts, or a decorator's template; as for ``lock``.
    - ``ttl``: seconds or a timedelta after which the lease expires unless it is renewed. It is renewed automatically,
      three times in each ttl, as long as the process lives. None: the lease has no expiry (a mutex), and after a crash
      a person has to revoke it in the admin.
    - ``min_hold``: seconds or a timedelta for which other holders are excluded, even if the lease is released earlier.
      For jobs that several hosts start at the same time by clocks that differ.
    - ``timeout``: seconds or a timedelta to wait; default 0 does not wait, None waits without limit.
    - ``owner``: the name of the holder, shown in the admin; default ``host:process``.
    - ``using``: database alias; default from the setting ``USING``.
    - ``on_busy``: what a decorated call does if the lease is taken; as for ``lock``, not for ``with``.

    The lease is acquired, renewed and released in separate database sessions, so it is independent of any ``atomic()``
    block. The handle has ``token``, ``lost``, ``extend(ttl)`` and ``assert_held()``.

    Raises ``LockNotAvailable`` if another holder has it, ``LockLost`` at the end if it was lost, ``LockKeyError`` for
    an invalid name, and ``ValueError`` for an invalid time, ``owner`` or ``on_busy``.
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
        super().__init__(parts, request_of("Lease", timeout=timeout, using=using), on_busy)
        if not isinstance(owner, str) or "\x00" in owner or any("\ud800" <= each <= "\udfff" for each in owner):
            raise ValueError(f"owner is {owner!r}; give a text without NUL characters and lone surrogates.")
        seconds = to_seconds(min_hold, name="min_hold") or 0.0
        terms = LeaseTerms(ttl=checked_ttl(ttl), min_hold=seconds, owner=owner, steps_down=self._steps_down)
        self._handle = partial(LeaseHandle, terms)
        self._async_handle = partial(LeaseHandle, terms, is_async=True)

    def _request_for(self, parts: tuple[Any, ...]) -> Request:
        # Not by KEY_FUNCTION, which is for advisory locks that are shared with other packages. Leases are not shared.
        name = make_key(*parts).name
        if "\x00" in name:
            raise LockKeyError(
                f"{name!r} contains a NUL character, which PostgreSQL cannot store in the row of a lease."
            )
        return self._request._replace(keys=(Key(name, sha256_key(name)),))

    if TYPE_CHECKING:  # for type checkers and editors: the handle of a lease has more than that of a lock

        def acquire(self, **options: Any) -> LeaseHandle: ...  # type: ignore[override]
        async def aacquire(self, **options: Any) -> LeaseHandle: ...  # type: ignore[override]
        def __enter__(self) -> LeaseHandle: ...  # type: ignore[override]
        async def __aenter__(self) -> LeaseHandle: ...  # type: ignore[override]


class leader(Lease):  # noqa: N801 - reads like lock
    """Be the only leader of this name: ``with leader("scheduler") as leadership: ...`` waits until elected.

    It is a lease with three differences. It waits by default. It always has a ttl, of 15 seconds by default. If any
    renewal fails, the leader steps down, long before the lease expires and another leader can be elected. As with each
    lease, the next waiter is woken at once when the leader leaves the block. Check ``leadership.lost``, or call
    ``assert_held()``, before each step of work::

        with leader("scheduler", ttl=15) as leadership:
            while not leadership.lost.wait(1):
                schedule(fence=leadership.token)

    Arguments as for ``Lease``, without ``min_hold``; ``ttl`` is 15 seconds by default, ``timeout`` None.
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
            raise ValueError("A leader needs a ttl: without one, no process could replace a leader that has died.")
        super().__init__(*parts, ttl=ttl, timeout=timeout, owner=owner, using=using, on_busy=on_busy)


class LeaseHandle(BaseHandle):
    """A lease of a thread or of a coroutine. True while it counts as held.

    ``token`` is its fencing token. ``lost`` is a ``threading.Event`` that is set when the lease no longer protects. A
    body that runs for long checks it, or calls ``assert_held()``, before each step. In a coroutine, ``acquire``,
    ``extend``, ``release`` and ``until_lost`` are awaited.
    """

    _noun = "Lease"
    _model = "Lease"
    scope = "lease"

    def __init__(self, terms: LeaseTerms, request: Request, *, is_async: bool = False) -> None:
        super().__init__(request)
        model_of("Lease")
        self.owner = terms.owner or f"{socket.gethostname()}:{os.getpid()}"
        self._is_async = is_async
        self._thread = lease_thread()
        self._holder = LeaseHolder(self._thread, request.keys[0], self.using, terms._replace(owner=self.owner))
        if terms.steps_down:
            # A candidate is there to wait.
            self._slow_wait = math.inf

    def _run(self, method: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
        """Run a method that asks the database. In a thread, each wait in it blocks, so it runs to its end at once."""
        running = method(*args)
        if self._is_async:
            return running
        try:
            running.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError(f"{method} waits in a thread")

    async def _in_thread(self, running: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the lease thread, and wait for it. An interrupt, or a cancel, cancels it."""
        future = self._thread.submit(running)
        try:
            return await asyncio.wrap_future(future) if self._is_async else future.result()
        except BaseException:
            future.cancel()
            raise

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

    def acquire(self, *, may_begin: bool = True) -> Any:
        """Acquire the lease. Raises ``LockNotAvailable`` if another holder has it for longer than the timeout."""
        if not self._is_async:
            _refuse_in_event_loop()
        return self._run(self._acquire)

    async def _acquire(self) -> LeaseHandle:
        self._free_if_dropped(partial(_release_unused, self._thread, self._holder))
        began = time.monotonic()
        try:
            is_granted = await self._in_thread(self._holder.acquire(self.request.timeout))
            self.waited = time.monotonic() - began
            if not is_granted:
                raise self._busy_error(None)  # noqa: TRY301 - what was requested is given up below
            self._announce_acquired()
        except BaseException:
            self.is_open = False
            released = self._thread.submit(self._holder.release_unused())
            self._stop_watch()
            if self._is_async:
                await asyncio.shield(asyncio.wrap_future(released))
            else:
                released.result()
            raise
        return self

    def extend(self, ttl: Timeout = None) -> Any:
        """Extend the lease to ``ttl`` from now on: seconds or a timedelta; default the ttl that it had.

        Raises ``LockLost`` if it is no longer held, ``LockError`` for a lease without expiry, ``ValueError`` for a ttl
        that is too short.
        """
        return self._run(self._extend, ttl)

    async def _extend(self, ttl: Timeout) -> None:
        seconds = checked_ttl(ttl)
        if not self._thread.is_inherited and self._holder.ttl is None:
            raise self._error(LockError, "has no ttl, so it cannot be extended")
        self.assert_held()
        if not await self._in_thread(self._holder.extend(seconds)):
            raise self._lost_error(self._holder.reason)

    def assert_held(self) -> None:
        """Raise ``LockLost`` if the lease no longer protects. Sends no query."""
        self._reason = self._holder.reason
        super().assert_held()

    def _lost_reason(self) -> str:
        return "" if self.is_held else "it has expired"

    async def until_lost(self) -> None:
        """Wait, in a coroutine, until the lease is lost or released."""
        if not self._thread.is_inherited:
            await self._in_thread(self._holder.until_ended())

    def release(self, error: BaseException | None = None) -> Any:
        """Release the lease. ``error`` is the exception of the body, if there is one. Then no other error is raised.

        Raises ``LockLost`` if the lease was lost, and ``LockError`` if it is not held or the release failed.
        """
        return self._run(self._release, error)

    async def _release(self, error: BaseException | None) -> None:
        if not self.is_open:
            raise self._error(LockError, "is not held")
        # After a fork, the lease of the parent is already lost here (lose_to_parent).
        try:
            was_ours = self._thread.is_inherited or await self._in_thread(self._holder.release())
        except BaseException:
            # The release was interrupted, and is repeated without a wait.
            self.free_from_any_thread()
            raise
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

    def free_from_any_thread(self) -> None:
        self.is_open = False
        _release_unused(self._thread, self._holder)
        self._stop_watch()


@async_unsafe("Acquiring a lease blocks the event loop here. Use 'async with', or await its aacquire().")
def _refuse_in_event_loop() -> None:
    pass


def _release_unused(thread: LeaseThread, holder: LeaseHolder) -> bool:
    if not thread.is_inherited:
        thread.submit(holder.release_unused())
    return not thread.is_inherited
