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
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from django.db import Error as DatabaseFailure
from django.utils.asyncio import async_unsafe

from django_pglock.errors import LockError, LockKeyError, model_of
from django_pglock.keys import Key, make_key, sha256_key
from django_pglock.locks.handle import BaseHandle, first_line, logger
from django_pglock.locks.lease_thread import (
    ACQUIRE,
    ANSWER_WITHIN,
    RELEASE,
    RENEW,
    UNDO,
    LeaseThread,
    lease_thread,
)
from django_pglock.locks.lock import Lock
from django_pglock.locks.request import OnBusy, Request, Timeout, checked_ttl, request_of, to_seconds

__all__ = ["Lease", "leader"]

#: Seconds between two polls of a waiter, if no notification of a release comes; with a longer ttl, a third of it.
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
        self._terms = LeaseTerms(
            ttl=checked_ttl(ttl),
            min_hold=to_seconds(min_hold, name="min_hold") or 0.0,
            owner=owner,
            steps_down=self._steps_down,
        )

    def _request_for(self, parts: tuple[Any, ...]) -> Request:
        # Not by KEY_FUNCTION, which is for advisory locks that are shared with other packages. Leases are not shared.
        name = make_key(*parts).name
        if "\x00" in name:
            raise LockKeyError(
                f"{name!r} contains a NUL character, which PostgreSQL cannot store in the row of a lease."
            )
        return self._request._replace(keys=(Key(name, sha256_key(name)),))

    def _handle(self, parts: tuple[Any, ...]) -> LeaseHandle:
        return LeaseHandle(self._request_for(parts), self._terms)

    def _async_handle(self, parts: tuple[Any, ...]) -> LeaseHandle:
        return LeaseHandle(self._request_for(parts), self._terms, is_async=True)

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

    def __init__(self, request: Request, terms: LeaseTerms, *, is_async: bool = False) -> None:
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
        try:
            is_granted = await self._in_thread(self._holder.acquire(self.request.timeout))
            self.waited = self._holder.waited
            if not is_granted:
                raise self._busy_error(None)  # noqa: TRY301 - what was requested is given up below
            self._announce_acquired()
        except BaseException:
            self.is_open = False
            released = self._thread.submit(self._holder.release_unused())
            if self._is_async:
                await asyncio.shield(asyncio.wrap_future(released))
            else:
                released.result()
            self._stop_watch()
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
        was_ours = self._thread.is_inherited or await self._in_thread(self._holder.release())
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

    def free_from_any_thread(self) -> None:
        self.is_open = False
        _release_unused(self._thread, self._holder)
        self._stop_watch()


@async_unsafe("Acquiring a lease blocks the event loop here. Use 'async with', or await its aacquire().")
def _refuse_in_event_loop() -> None:
    pass


def _release_unused(thread: LeaseThread, holder: LeaseHolder) -> None:
    if not thread.is_inherited:
        thread.submit(holder.release_unused())


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
            pause = max(LEASE_POLL, (self.ttl or 0) / 3)
            left = pause if timeout is None else min(pause, timeout - self.waited)
            if left <= 0:
                return False
            if seconds is not None:
                left = min(left, max(seconds, 0.01))
            await self._thread.wait_for_release(self._using, self._key.number, left)

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
        self._renewal = asyncio.ensure_future(self._keep_renewing())

    async def _keep_renewing(self) -> None:
        """Renew the lease three times in its ttl, until it is released or lost."""
        spent = 0.0
        while not self.lost.is_set():
            assert self.ttl is not None  # noqa: S101 - only leases that end are renewed
            pause = self.ttl / 3
            # After a renewal without an answer there is no pause, because there is time for one more attempt.
            await asyncio.sleep(max(0.0, pause - spent))
            began = boottime()
            try:
                await self._renew(pause)
            except (DatabaseFailure, OSError) as error:
                # A leader steps down at the first error. Any other holder can try again until the deadline.
                if self._terms.steps_down:
                    self._lose(f"it could not be renewed ({first_line(error)})")
            spent = boottime() - began

    async def _renew(self, within: float) -> bool:
        """Renew the lease once, and set the new deadline. Return whether it is still held."""
        began = boottime()
        if await self._execute(RENEW, within=within) is None:
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
        return await self._renew(ANSWER_WITHIN)

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
