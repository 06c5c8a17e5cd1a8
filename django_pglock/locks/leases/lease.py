"""Leases: locks in a row of a table, with an owner, an expiry and a fencing token.

An advisory lock ends with its database session. A lease ends when its time is over, whatever happens to sessions,
servers and networks. It survives a restart and a failover, and works behind each pooler. The price: a holder may be
stopped for longer than the lease lasts, and then continue as if it still held the lease. A lock service cannot prevent
this, but a fencing token can. The token grows with each holder, and the service that the holder writes to must refuse a
token that is smaller than the largest one it has seen (Kleppmann, "How to do distributed locking", 2016).

All times are the database's, because the clocks of hosts may be wrong.
"""

from __future__ import annotations

from typing import Any

from django_pglock.errors import LockKeyError
from django_pglock.keys import Key, make_key, sha256_key
from django_pglock.locks.leases.handle import AsyncLeaseHandle, LeaseHandle
from django_pglock.locks.leases.holder import LeaseTerms
from django_pglock.locks.lock import Lock
from django_pglock.locks.request import OnBusy, Timeout, checked_ttl, request_of, to_seconds

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
        super().__init__(parts, request_of(timeout, using=using), on_busy)
        if not isinstance(owner, str) or "\x00" in owner or any("\ud800" <= each <= "\udfff" for each in owner):
            raise ValueError(f"owner is {owner!r}; give a text without NUL characters and lone surrogates.")
        self._terms = LeaseTerms(
            ttl=checked_ttl(ttl),
            min_hold=to_seconds(min_hold, name="min_hold") or 0.0,
            owner=owner,
            steps_down=self._steps_down,
        )

    def _handle(self, parts: tuple[Any, ...]) -> LeaseHandle:
        return LeaseHandle(_key(parts), self._request, self._terms)

    def _async_handle(self, parts: tuple[Any, ...]) -> AsyncLeaseHandle:
        return AsyncLeaseHandle(_key(parts), self._request, self._terms)


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


def _key(parts: tuple[Any, ...]) -> Key:
    # Not by KEY_FUNCTION, which is for advisory locks that are shared with other packages. Leases are not shared.
    name = make_key(*parts).name
    if "\x00" in name:
        raise LockKeyError(f"{name!r} contains a NUL character, which PostgreSQL cannot store in the row of a lease.")
    return Key(name, sha256_key(name))
