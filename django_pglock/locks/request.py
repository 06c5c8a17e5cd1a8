"""What a caller asks for: the request of one acquire, and the checks of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from django_pglock.conf import SCOPES
from django_pglock.errors import LockScopeError
from django_pglock.keys import Key

Timeout = float | timedelta | None
OnBusy = Literal["raise", "skip"] | Callable[..., Any]
#: It must be long enough for three renewals, each with a round trip to the database.
SHORTEST_TTL = 0.3


class Request(NamedTuple):
    """The request of one acquire. A lock object has it without keys.

    ``keys`` are in the order of their numbers, without duplicates. All sessions take several locks in this order, so
    that two sessions cannot deadlock. The order of the names would not be enough, because two names may have the same
    number.
    """

    keys: tuple[Key, ...] = ()
    #: Seconds; None waits without limit.
    timeout: float | None = None
    shared: bool = False
    #: None: as the setting says.
    scope: str | None = None
    using: str | None = None
    reentrant: bool = True
    #: Take a transaction lock whatever the isolation level is.
    stale_ok: bool = False
    #: Milliseconds for which the holder may leave its session idle; None has no limit.
    max_hold: int | None = None
    #: For a semaphore: the lock for which all waiters queue. Then one of the keys is granted.
    queue: Key | None = None

    @property
    def wait(self) -> int | None:
        """Milliseconds to wait; None waits without limit."""
        return _milliseconds(self.timeout)

    @property
    def name(self) -> str:
        """The name for people. Several names are joined by commas."""
        if self.queue is not None:
            return self.keys[0].name.rpartition("#")[0]
        return ", ".join(key.name for key in self.keys)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the keys."""
        return tuple([key.number for key in self.keys])

    def only(self, number: int) -> Request:
        """Return the request for the key of this number alone."""
        return self._replace(keys=tuple(key for key in self.keys if key.number == number))

    def without(self, numbers: AbstractSet[int]) -> Request:
        """Return the request without the keys of these numbers."""
        return self._replace(keys=tuple(key for key in self.keys if key.number not in numbers))


def in_order(keys: Sequence[Key]) -> tuple[Key, ...]:
    """Return keys sorted by their numbers, each number once."""
    return tuple(key for _, key in sorted({key.number: key for key in keys}.items()))


def _milliseconds(seconds: float | None) -> int | None:
    # For PostgreSQL 0 means "no limit", so the shortest limit is one millisecond.
    return None if seconds is None else max(1, round(seconds * 1000)) if seconds else 0


def to_seconds(value: Timeout, *, name: str = "timeout") -> float | None:
    """Return a time in seconds. Raises ``ValueError``, with the argument's ``name``, for an invalid time."""
    if value is None:
        return None
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    # The upper bound is PostgreSQL's: its timeouts are ints of milliseconds.
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= 2_147_483:
        raise ValueError(f"{name} is {value!r}; give seconds (0 to 2,147,483), a timedelta, or None for no limit.")
    return float(seconds)


#: The options of other packages' locks, and what to write here.
FOREIGN_OPTIONS = {
    **dict.fromkeys(["block", "blocking", "non_blocking", "nowait", "skip_locked", "wait"], "timeout=0, or try_lock()"),
    **dict.fromkeys(["acquire_timeout", "blocking_timeout", "timeout_seconds", "wait_timeout"], "timeout="),
    **dict.fromkeys(["expire", "expires", "lease", "lock_timeout", "ttl"], "Lease(…, ttl=…), or lock(…, max_hold=…)"),
    **dict.fromkeys(["transaction", "xact"], "scope='transaction'"),
    **dict.fromkeys(["alias", "database", "db"], "using="),
    "side_effect": "on_busy=, or try_lock()",
    "exclusive": "shared=",
}


def request_of(
    where: str,
    *,
    timeout: Timeout = None,
    shared: bool = False,
    scope: str | None = None,
    using: str | None = None,
    reentrant: bool = True,
    stale_ok: bool = False,
    max_hold: Timeout = None,
    **unknown: Any,
) -> Request:
    """Return the request without keys, from the options of ``where``.

    Raises ``ValueError`` and ``LockScopeError`` for invalid options, and ``TypeError`` for unknown ones.
    """
    for name in unknown:
        meant = FOREIGN_OPTIONS.get(name)
        raise TypeError(f"{where}() has no option {name!r}" + (f"; write {meant}." if meant else "."))
    if scope is not None and scope not in SCOPES:
        raise LockScopeError(f"scope is {scope!r}; use one of {', '.join(map(repr, SCOPES))}.")
    seconds = None if timeout is None else to_seconds(timeout)
    limit = None if max_hold is None else _milliseconds(to_seconds(max_hold, name="max_hold"))
    if limit == 0:
        raise ValueError("max_hold is 0; give seconds above zero, a timedelta, or None for no limit.")
    return Request((), seconds, shared, scope, using, reentrant, stale_ok, limit)


def checked_ttl(value: Timeout) -> float | None:
    """Return the argument ``ttl`` in seconds. Raises ``ValueError`` for a time that is too short."""
    seconds = to_seconds(value, name="ttl")
    if seconds is not None and seconds < SHORTEST_TTL:
        raise ValueError(f"ttl is {value!r}; give at least {SHORTEST_TTL} s.")
    return seconds
