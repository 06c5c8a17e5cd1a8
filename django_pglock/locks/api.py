"""``lock``, ``try_lock``, ``lock_all`` and ``semaphore``: what users write."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, TypeVar, overload

from django_pglock.locks.lock import MOST_KEYS, Lock, LockAll, Semaphore, TryLock
from django_pglock.locks.request import OnBusy, Timeout, request_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    P = ParamSpec("P")
    R = TypeVar("R")

    class SemaphoreOptions(TypedDict, total=False):
        """The options of ``semaphore`` that do not change what a decorated function returns."""

        timeout: Timeout
        scope: str | None
        using: str | None

    class LockOptions(SemaphoreOptions, total=False):
        """The same options for ``lock``, ``try_lock`` and ``lock_all``."""

        shared: bool
        reentrant: bool
        stale_ok: bool
        max_hold: Timeout

    class SkippingLock(Lock):
        """The type of a lock with ``on_busy="skip"``: a decorated call may return None."""

        @overload  # type: ignore[override]
        def __call__(
            self, function: Callable[P, Coroutine[Any, Any, R]]
        ) -> Callable[P, Coroutine[Any, Any, R | None]]: ...
        @overload
        def __call__(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
        def __call__(self, function: Any) -> Any: ...


__all__ = ["lock", "lock_all", "semaphore", "try_lock"]


@overload
def lock(*parts: Any, on_busy: Literal["skip"], **options: Unpack[LockOptions]) -> SkippingLock: ...


@overload
def lock(*parts: Any, on_busy: OnBusy = ..., **options: Unpack[LockOptions]) -> Lock: ...


def lock(*parts: Any, on_busy: OnBusy = "raise", **options: Unpack[LockOptions]) -> Lock:
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
    - ``reentrant``: False refuses a lock that this thread or coroutine holds already. In a thread, the server is asked.
    - ``stale_ok``: take a transaction lock also at REPEATABLE READ and above, where the snapshot is older than the
      lock.
    - ``max_hold``: seconds or a timedelta for which the holder may leave its database session idle. A holder that
      stalls for longer has its session ended by PostgreSQL, and the lock with it.

    ``async with`` and coroutine functions take the lock in a separate session, so it also excludes other coroutines of
    the same process. Such a lock is independent of an ``atomic()`` block around it.

    Returns a ``Lock``: a context manager and a decorator, whose ``acquire()`` and ``aacquire()`` return a handle.
    Raises ``ValueError`` for an invalid time or ``on_busy``, ``TypeError`` for an unknown option, and ``LockKeyError``
    for an invalid name. Its use raises ``LockNotAvailable`` if the lock is busy, ``LockLost`` at the end if the lock
    was lost, and ``LockScopeError`` if it would not protect. PostgreSQL's rules:
    https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS.
    """
    return Lock(parts, request_of("lock", **options), on_busy)


def try_lock(*parts: Any, **options: Unpack[LockOptions]) -> TryLock:
    """Like ``lock``, but the body decides: ``with try_lock("report") as held: if held: ...``.

    The arguments are those of ``lock``; the default timeout is 0 seconds. If the lock is busy, no error is raised, and
    the handle is false. All other errors are raised as by ``lock``.
    """
    options.setdefault("timeout", 0)
    return TryLock(parts, request_of("try_lock", **options), "skip")


@overload
def lock_all(*names: Any, on_busy: Literal["skip"], **options: Unpack[LockOptions]) -> SkippingLock: ...


@overload
def lock_all(*names: Any, on_busy: OnBusy = ..., **options: Unpack[LockOptions]) -> Lock: ...


def lock_all(*names: Any, on_busy: OnBusy = "raise", **options: Unpack[LockOptions]) -> Lock:
    """Hold several locks, all or none: ``with lock_all("a", ("order", 5), account): ...``.

    Each of ``names`` is an argument of ``lock``: a string, an int, a saved model instance, or a tuple of parts. The
    locks are taken in one statement and in the order of their numbers, so that two callers cannot deadlock. The
    ``timeout`` is for all locks together. Each string of a decorator is a template.

    Raises as ``lock`` does, and ``LockKeyError`` for no names or more than a thousand. Instead of so many locks, take
    one lock on the object that they have in common.
    """
    return LockAll(names, request_of("lock_all", **options), on_busy)


@overload
def semaphore(
    *parts: Any, limit: int, on_busy: Literal["skip"], **options: Unpack[SemaphoreOptions]
) -> SkippingLock: ...


@overload
def semaphore(*parts: Any, limit: int, on_busy: OnBusy = ..., **options: Unpack[SemaphoreOptions]) -> Lock: ...


def semaphore(*parts: Any, limit: int, on_busy: OnBusy = "raise", **options: Unpack[SemaphoreOptions]) -> Lock:
    """Allow at most ``limit`` holders at once: ``with semaphore("render", limit=3): ...``.

    The other arguments are those of ``lock``. All callers must use the same limit. A holder has one of the slots
    ``name#1`` to ``name#limit``, each of which is a lock. Waiters queue for the lock ``name#queue`` and are served in
    the order of their arrival.

    Raises as ``lock`` does, and ``ValueError`` for a limit below one or above a thousand.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MOST_KEYS:
        raise ValueError(f"limit is {limit!r}; give a number of holders from 1 to {MOST_KEYS}.")
    return Semaphore(parts, request_of("semaphore", **options), on_busy, limit)
