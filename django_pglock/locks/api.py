"""``lock``, ``try_lock``, ``lock_all`` and ``semaphore``: what users write."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, TypeVar, overload

from django_pglock.errors import LockKeyError, LockNotAvailable
from django_pglock.keys import Key, key_of, make_key, name_of
from django_pglock.locks.async_handle import AsyncHandle
from django_pglock.locks.context_decorator import ContextDecorator
from django_pglock.locks.handle import Handle
from django_pglock.locks.options import OnBusy, Options, Timeout, checked_max_hold, checked_scope, to_seconds
from django_pglock.locks.semaphore_handles import AsyncSlotHandle, SlotHandle

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class SemaphoreOptions(TypedDict, total=False):
        """The options of ``semaphore`` that do not change what a decorated function returns."""

        timeout: Timeout
        scope: str | None
        using: str | None

    class LockOptions(SemaphoreOptions, total=False):
        """The same options for ``lock`` and ``lock_all``."""

        shared: bool
        reentrant: bool
        stale_ok: bool
        max_hold: Timeout


__all__ = ["lock", "lock_all", "semaphore", "try_lock"]


#: PostgreSQL stores the locks of all sessions in one table in shared memory. Thousands of locks in one call could fill
#: it, and then no client can connect.
MOST_KEYS = 1000


@overload
def lock(*parts: Any, on_busy: Literal["skip"], **options: Unpack[LockOptions]) -> SkippingLock: ...


@overload
def lock(*parts: Any, on_busy: OnBusy = ..., **options: Unpack[LockOptions]) -> Lock: ...


def lock(
    *parts: Any,
    timeout: Timeout = None,
    shared: bool = False,
    scope: str | None = None,
    using: str | None = None,
    on_busy: OnBusy = "raise",
    reentrant: bool = True,
    stale_ok: bool = False,
    max_hold: Timeout = None,
) -> Lock:
    """Hold a named advisory lock: ``with lock("ledger", account.pk): ...``, or decorate a function with it.

    - ``parts``: the name, or its parts; see ``django_pglock.keys``. A decorator's single string is a template over the
      function's parameters (``"sync:{shop_id}"``); without parts its name is the function's dotted path.
    - ``timeout``: seconds or a timedelta; None (default) waits without limit, 0 does not wait.
    - ``shared``: allow other shared holders; only exclusive holders are excluded.
    - ``scope``: ``"auto"`` (the setting's default: transaction inside ``atomic()``, else session), ``"session"`` or
      ``"transaction"``.
    - ``using``: database alias; default from the setting ``USING``.
    - ``on_busy``: what a decorated call does when the lock is busy: ``"raise"``, ``"skip"`` (return None) or a callable
      that gets the exception and the call's arguments and whose result is returned. A block cannot be skipped, so
      ``with`` and ``acquire()`` refuse it; use ``try_lock`` there.
    - ``reentrant``: False refuses a lock that this thread or coroutine holds already.
    - ``stale_ok``: take a transaction lock also at REPEATABLE READ and above, where the snapshot is older than the
      lock.
    - ``max_hold``: seconds or a timedelta for which the holder may leave its database session idle. A holder that
      stalls for longer has its session ended by PostgreSQL, and the lock with it.

    ``async with`` and coroutine functions take the lock in a separate session, so it also excludes other coroutines of
    the same process. Such a lock is independent of an ``atomic()`` block around it.

    Returns a ``Lock``: a context manager and a decorator, whose ``acquire()`` and ``aacquire()`` return a handle.
    Raises ``ValueError`` for an invalid time or ``on_busy``, and ``LockKeyError`` for an invalid name. Its use raises
    ``LockNotAvailable`` if the lock is busy, ``LockLost`` at the end if the lock was lost, and ``LockScopeError`` if it
    would not protect. PostgreSQL's rules:
    https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS.
    """
    options = _options(timeout, shared, scope, using, reentrant=reentrant, stale_ok=stale_ok, max_hold=max_hold)
    return Lock(parts, options, on_busy)


def try_lock(
    *parts: Any,
    shared: bool = False,
    scope: str | None = None,
    using: str | None = None,
    timeout: Timeout = 0,
    reentrant: bool = True,
    stale_ok: bool = False,
    max_hold: Timeout = None,
) -> TryLock:
    """Like ``lock``, but the body decides: ``with try_lock("report") as held: if held: ...``.

    The arguments are those of ``lock``; the default timeout is 0 seconds. If the lock is busy, no error is raised, and
    the handle is false. All other errors are raised as by ``lock``.
    """
    options = _options(timeout, shared, scope, using, reentrant=reentrant, stale_ok=stale_ok, max_hold=max_hold)
    return TryLock(parts, options, "skip")


@overload
def lock_all(*names: Any, on_busy: Literal["skip"], **options: Unpack[LockOptions]) -> SkippingLock: ...


@overload
def lock_all(*names: Any, on_busy: OnBusy = ..., **options: Unpack[LockOptions]) -> Lock: ...


def lock_all(
    *names: Any,
    timeout: Timeout = None,
    shared: bool = False,
    scope: str | None = None,
    using: str | None = None,
    on_busy: OnBusy = "raise",
    reentrant: bool = True,
    stale_ok: bool = False,
    max_hold: Timeout = None,
) -> Lock:
    """Hold several locks, all or none: ``with lock_all("a", ("order", 5), account): ...``.

    Each of ``names`` is an argument of ``lock``: a string, an int, a saved model instance, or a tuple of parts. The
    locks are taken in one statement and in the order of their numbers, so that two callers cannot deadlock. The
    ``timeout`` is for all locks together. Each string of a decorator is a template.

    Raises as ``lock`` does, and ``LockKeyError`` for no names or more than a thousand. Instead of so many locks, take
    one lock on the object that they have in common.
    """
    options = _options(timeout, shared, scope, using, reentrant=reentrant, stale_ok=stale_ok, max_hold=max_hold)
    return LockAll(names, options, on_busy)


@overload
def semaphore(
    *parts: Any, limit: int, on_busy: Literal["skip"], **options: Unpack[SemaphoreOptions]
) -> SkippingLock: ...


@overload
def semaphore(*parts: Any, limit: int, on_busy: OnBusy = ..., **options: Unpack[SemaphoreOptions]) -> Lock: ...


def semaphore(
    *parts: Any,
    limit: int,
    timeout: Timeout = None,
    scope: str | None = None,
    using: str | None = None,
    on_busy: OnBusy = "raise",
) -> Lock:
    """Allow at most ``limit`` holders at once: ``with semaphore("render", limit=3): ...``.

    The other arguments are those of ``lock``. All callers must use the same limit. A holder has one of the slots
    ``name#1`` to ``name#limit``, each of which is a lock. Waiters queue for the lock ``name#queue`` and are served in
    the order of their arrival.

    Raises as ``lock`` does, and ``ValueError`` for a limit below one or above a thousand.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MOST_KEYS:
        raise ValueError(f"limit is {limit!r}; give a number of holders from 1 to {MOST_KEYS}.")
    return Semaphore(parts, _options(timeout, False, scope, using), on_busy, limit)


def _options(
    timeout: Timeout, shared: bool, scope: str | None, using: str | None, *, max_hold: Timeout = None, **more: Any
) -> Options:
    seconds, limit = to_seconds(timeout), checked_max_hold(max_hold)
    return Options(timeout=seconds, shared=shared, scope=checked_scope(scope), using=using, max_hold=limit, **more)


class Lock(ContextDecorator[Handle, AsyncHandle]):
    """Options of a lock; made by ``lock()``."""

    def __init__(self, parts: tuple[Any, ...], options: Options, on_busy: OnBusy) -> None:
        super().__init__(parts, on_busy)
        self._options = options

    def _keys(self, parts: tuple[Any, ...]) -> list[Key]:
        return [key_of(self._name) if parts is self._parts and parts else make_key(*parts)]

    def _handle(self, parts: tuple[Any, ...]) -> Handle:
        return Handle(self._keys(parts), self._options)

    def _async_handle(self, parts: tuple[Any, ...]) -> AsyncHandle:
        return AsyncHandle(self._keys(parts), self._options)


class TryLock(Lock):
    """Options of a lock whose acquire may fail without an error; made by ``try_lock()``. The handle is false then."""

    def _check_without_call(self) -> None:
        pass

    def _acquire(self, handle: Handle, *, may_begin: bool) -> None:
        with suppress(LockNotAvailable):
            handle.acquire(may_begin=may_begin)

    async def _aacquire(self, handle: AsyncHandle) -> None:
        with suppress(LockNotAvailable):
            await handle.acquire()


class LockAll(Lock):
    """Options of several locks; made by ``lock_all()``."""

    _each_part_is_a_name = True

    def _check(self, parts: tuple[Any, ...]) -> str:
        if not 0 < len(parts) <= MOST_KEYS:
            raise LockKeyError(f"lock_all was given {len(parts)} names; it takes 1 to {MOST_KEYS}.")
        return ", ".join(str(name_of(*_parts_of(name))) for name in parts)

    def _keys(self, parts: tuple[Any, ...]) -> list[Key]:
        return [make_key(*_parts_of(name)) for name in parts]


class Semaphore(Lock):
    """Options of a semaphore; made by ``semaphore()``."""

    def __init__(self, parts: tuple[Any, ...], options: Options, on_busy: OnBusy, limit: int) -> None:
        super().__init__(parts, options, on_busy)
        self._limit = limit

    def _keys(self, parts: tuple[Any, ...]) -> list[Key]:
        name = name_of(*parts)
        return [make_key(f"{name}#{number}") for number in range(1, self._limit + 1)]

    def _handle(self, parts: tuple[Any, ...]) -> Handle:
        return SlotHandle(self._keys(parts), self._options)

    def _async_handle(self, parts: tuple[Any, ...]) -> AsyncHandle:
        return AsyncSlotHandle(self._keys(parts), self._options)


if TYPE_CHECKING:
    P = ParamSpec("P")
    R = TypeVar("R")

    class SkippingLock(Lock):
        """The type of a lock with ``on_busy="skip"``: a decorated call may return None."""

        @overload  # type: ignore[override]
        def __call__(
            self, function: Callable[P, Coroutine[Any, Any, R]]
        ) -> Callable[P, Coroutine[Any, Any, R | None]]: ...
        @overload
        def __call__(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
        def __call__(self, function: Any) -> Any: ...


def _parts_of(name: Any) -> tuple[Any, ...]:
    return name if isinstance(name, tuple) else (name,)
