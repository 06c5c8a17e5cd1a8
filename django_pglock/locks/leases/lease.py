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
import sys
import threading
from typing import Any

from django.utils.asyncio import async_unsafe

from django_pglock.errors import LockError, LockKeyError, model_of
from django_pglock.keys import Key, make_key, sha256_key
from django_pglock.locks.base_handle import BaseHandle, first_line, logger
from django_pglock.locks.context_decorator import ContextDecorator
from django_pglock.locks.leases.holder import LeaseHolder, LeaseTerms
from django_pglock.locks.leases.thread import LeaseThread, lease_thread
from django_pglock.locks.options import OnBusy, Options, Timeout, to_seconds
from django_pglock.postgres import forking


class LeaseHandle(BaseHandle):
    """A lease that is held. True while it counts as held.

    ``token`` is its fencing token. ``lost`` is a ``threading.Event`` that is set when the lease cannot be counted on
    any more; a body that runs for long looks at it, or calls ``assert_held()`` before each step.
    """

    _model = "Lease"
    _lease_holder: LeaseHolder | None = None

    def __init__(self, key: Key, options: Options, terms: LeaseTerms) -> None:
        super().__init__([key], options)
        self.scope = "lease"
        model_of("Lease")
        self.owner = terms.owner or f"{socket.gethostname()}:{os.getpid()}"
        self._lease_thread: LeaseThread = lease_thread()
        self._lease_holder = LeaseHolder(self._lease_thread, key, self.using, self.owner, terms)

    @property
    def _own(self) -> LeaseHolder:
        assert self._lease_holder is not None  # noqa: S101 - set by __init__
        return self._lease_holder

    @property
    def is_held(self) -> bool:
        """Whether it counts as held now."""
        return self.is_open and not self._own.is_over

    def __del__(self) -> None:
        if self.is_open and self._generation == forking.generation() and not sys.is_finalizing():
            logger.warning("Lease %r was given back because its handle was dropped without release().", self.name)
            self.free_from_any_thread()

    @property
    def token(self) -> int:  # type: ignore[override]
        """The fencing token: it grows with each holder."""
        # Nobody is given a handle that has none yet.
        return self._own.token or 0

    @property
    def lost(self) -> threading.Event:
        """Set when the lease cannot be counted on any more."""
        return self._own.lost

    @async_unsafe("Taking a lease stops the event loop here. Use 'async with', or await its aacquire().")
    def acquire(self, *, may_begin: bool = True) -> LeaseHandle:
        """Take the lease. Raises ``LockNotAvailable`` when it is taken for longer than the timeout."""
        try:
            self._note(self._lease_thread.call(self._own.acquire(self.options.timeout)))
        except BaseException:
            self.is_open = False
            self._lease_thread.call(self._own.release_unused())
            raise
        return self

    def extend(self, ttl: Timeout = None) -> None:
        """Let the lease last for ``ttl`` from now on (default: as long as before).

        Raises ``LockLost`` when it is not held any more, ``ValueError`` for a ttl that is too short.
        """
        seconds = self._seconds_to_extend(ttl)
        self._note_extended(self._lease_thread.call(self._own.extend(seconds)))

    def assert_held(self) -> None:
        """Raise ``LockLost`` if the lease cannot be counted on any more. Asks the server nothing."""
        self._reason = self._own.reason
        super().assert_held()

    def _lost_reason(self) -> str:
        return "" if self.is_held else "it has come to its end"

    def release(self, error: BaseException | None = None) -> None:
        """Give the lease back. Raises ``LockLost`` and ``LockError`` unless ``error`` is what the body raised."""
        self._refuse_unless_held()
        is_inherited = self._lease_thread.is_inherited
        self._finish(False if is_inherited else self._lease_thread.call(self._own.release()), error)

    def free_from_any_thread(self) -> None:
        self.is_open = False
        if not self._lease_thread.is_inherited:
            self._lease_thread.start(self._own.release_unused())

    # What both kinds of handle do here

    def _note(self, is_granted: bool) -> None:
        self.waited = self._own.waited
        if not is_granted:
            raise self._busy_error(None)
        self._note_acquired()

    def _refuse_unless_held(self) -> None:
        if not self.is_open:
            raise LockError(f"Lease {self.name!r} is not held.", name=self.name, key=self.key)
        self.is_open = False

    def _seconds_to_extend(self, ttl: Timeout) -> float | None:
        seconds = _ttl_of(ttl)
        if self._lease_thread.is_inherited:
            raise self._lost_error(self._own.reason)
        if self._own.ttl is None:
            raise LockError(f"Lease {self.name!r} has no end to put off.", name=self.name, key=self.key)
        self.assert_held()
        return seconds

    def _note_extended(self, is_held: bool) -> None:
        if not is_held:
            raise self._lost_error(self._own.reason)

    def _finish(self, was_ours: bool | Exception, error: BaseException | None) -> None:
        """Say what came of giving it back. ``error`` is the body's own exception, which is not replaced by another."""
        if isinstance(was_ours, Exception):
            failed = self._failed(was_ours)
            if error is None:
                raise failed from was_ours
            logger.error("%s", failed)
        elif not was_ours or self.lost.is_set():
            self._report_lost(self._own.reason or "the database says that it has come to its end", error)
        self._note_released()

    def _failed(self, error: Exception) -> LockError:
        ttl = self._own.ttl
        rest = "has to be freed by hand" if ttl is None else f"ends by itself within {ttl:g} s"
        text = f"Lease {self.name!r} could not be given back ({first_line(error)}); it {rest}."
        return LockError(text, name=self.name, key=self.key)


class AsyncLeaseHandle(LeaseHandle):
    """A lease that a coroutine holds. The event loop never waits for the database."""

    async def acquire(self) -> AsyncLeaseHandle:  # type: ignore[override]
        """Take the lease; as ``LeaseHandle.acquire``."""
        try:
            self._note(await self._lease_thread.acall(self._own.acquire(self.options.timeout)))
        except BaseException:
            self.is_open = False
            await asyncio.shield(self._lease_thread.acall(self._own.release_unused()))
            raise
        return self

    async def extend(self, ttl: Timeout = None) -> None:  # type: ignore[override]
        """Let the lease last for ``ttl`` from now on; as ``LeaseHandle.extend``."""
        seconds = self._seconds_to_extend(ttl)
        self._note_extended(await self._lease_thread.acall(self._own.extend(seconds)))

    async def until_lost(self) -> None:
        """Wait until the lease cannot be counted on any more, or is given back."""
        if not self._lease_thread.is_inherited:
            await self._lease_thread.acall(self._own.until_ended())

    async def release(self, error: BaseException | None = None) -> None:  # type: ignore[override]
        """Give the lease back; as ``LeaseHandle.release``."""
        self._refuse_unless_held()
        is_inherited = self._lease_thread.is_inherited
        self._finish(False if is_inherited else await self._lease_thread.acall(self._own.release()), error)


class Lease(ContextDecorator[LeaseHandle, AsyncLeaseHandle]):
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
        self._options = Options(timeout=to_seconds(timeout), using=using)
        self._terms = LeaseTerms(
            ttl=seconds,
            min_hold=to_seconds(min_hold, name="min_hold") or 0.0,
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
    seconds = to_seconds(ttl, name="ttl")
    if seconds is not None and seconds < SHORTEST_TTL:
        raise ValueError(f"ttl is {ttl!r}; give at least {SHORTEST_TTL} s.")
    return seconds


def _key(parts: tuple[Any, ...]) -> Key:
    # Not by KEY_FUNCTION, which is for sharing advisory locks with other packages; leases are ours alone.
    name = make_key(*parts).name
    if "\x00" in name:
        raise LockKeyError(f"{name!r} contains a NUL character, which no row can hold; a lease's name stands in one.")
    return Key(name, sha256_key(name))
