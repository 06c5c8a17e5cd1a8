"""The options of a lock object, the request of one acquire, and the checks of arguments."""

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


class Options(NamedTuple):
    """The options of a lock. ``timeout`` and ``max_hold`` are in seconds; ``scope`` None means the setting."""

    timeout: float | None = None
    shared: bool = False
    scope: str | None = None
    using: str | None = None
    reentrant: bool = True
    stale_ok: bool = False
    max_hold: float | None = None


class Request(NamedTuple):
    """The request of one acquire to PostgreSQL. ``keys`` are in the order of their numbers, without duplicates.

    All sessions take several locks in this order, so that two sessions cannot deadlock. The order of the names would
    not be enough, because two names may have the same number.
    """

    keys: tuple[Key, ...]
    shared: bool
    #: Milliseconds to wait; None waits without limit.
    wait: int | None
    #: Milliseconds for which the holder may leave its session idle; None has no limit.
    max_hold: int | None
    #: Take a transaction lock whatever the isolation level is.
    stale_ok: bool = False

    @classmethod
    def of(cls, keys: Sequence[Key], options: Options) -> Request:
        """Return the request for these keys, sorted."""
        wait, max_hold = _milliseconds(options.timeout), _milliseconds(options.max_hold)
        ordered = in_order(keys) if len(keys) > 1 else tuple(keys)
        return cls(ordered, options.shared, wait, max_hold, options.stale_ok)

    def only(self, number: int) -> Request:
        """Return the request for the key of this number alone."""
        return self._replace(keys=tuple(key for key in self.keys if key.number == number))

    @property
    def name(self) -> str:
        """The name for people. Several names are joined by commas."""
        return ", ".join(key.name for key in self.keys)

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of the keys."""
        return frozenset([key.number for key in self.keys])

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


def checked_scope(value: str | None) -> str | None:
    """Return the argument ``scope``. Raises ``LockScopeError`` for an unknown scope."""
    if value is not None and value not in SCOPES:
        raise LockScopeError(f"scope is {value!r}; use one of {', '.join(map(repr, SCOPES))}.")
    return value


def checked_on_busy(value: OnBusy) -> OnBusy:
    """Return the argument ``on_busy``. Raises ``ValueError`` for an invalid value."""
    if not (value in ("raise", "skip") or callable(value)):
        raise ValueError(f"on_busy is {value!r}; give 'raise', 'skip' or a function.")
    return value


def checked_max_hold(value: Timeout) -> float | None:
    """Return the argument ``max_hold`` in seconds. Raises ``ValueError`` for an invalid time, and for 0."""
    seconds = to_seconds(value, name="max_hold")
    if seconds == 0:
        raise ValueError("max_hold is 0; give seconds above zero, a timedelta, or None for no limit.")
    return seconds


#: It must be long enough for three renewals, each with a round trip to the database.
SHORTEST_TTL = 0.3


def checked_ttl(value: Timeout) -> float | None:
    """Return the argument ``ttl`` in seconds. Raises ``ValueError`` for a time that is too short."""
    seconds = to_seconds(value, name="ttl")
    if seconds is not None and seconds < SHORTEST_TTL:
        raise ValueError(f"ttl is {value!r}; give at least {SHORTEST_TTL} s.")
    return seconds
