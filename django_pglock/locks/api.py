"""``lock`` and ``try_lock``: with statement, decorator, or handle.

What these return holds options and no state: it may be made at import and used by many threads at once. Each use takes
a handle of its own.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, TypeVar

from django_pglock.errors import ConfigurationError, LockNotAvailable
from django_pglock.keys import make_key, name_of
from django_pglock.locks.handle import Handle, Options
from django_pglock.locks.template import KeyTemplate

F = TypeVar("F", bound=Callable[..., Any])
Timeout = float | timedelta | None
OnBusy = Literal["raise", "skip"] | Callable[..., Any]


def lock(
    *parts: Any,
    timeout: Timeout = None,
    shared: bool = False,
    scope: str | None = None,
    using: str | None = None,
    on_busy: OnBusy = "raise",
    reentrant: bool = True,
    stale_ok: bool = False,
) -> Lock:
    """Hold a named advisory lock: ``with lock("ledger", account.pk): ...``, or decorate a function with it.

    - ``parts``: the name, or its parts; see ``django_pglock.keys``. A decorator's single string is a template over the
      function's parameters (``"sync:{shop_id}"``); without parts its name is the function's dotted path.
    - ``timeout``: seconds or a timedelta; None (default) waits without limit, 0 does not wait.
    - ``shared``: allow other shared holders; only exclusive ones are kept out.
    - ``scope``: ``"auto"`` (the setting's default: transaction inside ``atomic()``, else session), ``"session"`` or
      ``"transaction"``.
    - ``using``: database alias; default from the setting ``USING``.
    - ``on_busy``: what a decorated call does when the lock is not to be had: ``"raise"``, ``"skip"`` (return None) or
      a callable that gets the exception and the call's arguments and whose result is returned.
    - ``reentrant``: False refuses a lock that this thread holds already.
    - ``stale_ok``: take a transaction lock also at REPEATABLE READ and above, where the snapshot is older than it.

    Raises ``LockNotAvailable`` when busy, ``LockLost`` at the end if the lock was lost, ``LockScopeError`` where it
    would not protect, ``LockKeyError`` for a bad name, ``ValueError`` for a bad timeout.
    """
    options = Options(
        timeout=seconds_of(timeout), shared=shared, scope=scope, using=using, reentrant=reentrant, stale_ok=stale_ok
    )
    return Lock(parts, options, on_busy)


def try_lock(
    *parts: Any,
    shared: bool = False,
    scope: str | None = None,
    using: str | None = None,
    timeout: Timeout = 0,
    reentrant: bool = True,
    stale_ok: bool = False,
) -> TryLock:
    """Like ``lock``, but the body decides: ``with try_lock("report") as held: if held: ...``.

    The default timeout is 0. Nothing is raised when the lock is busy; the handle is false then.
    """
    options = Options(
        timeout=seconds_of(timeout), shared=shared, scope=scope, using=using, reentrant=reentrant, stale_ok=stale_ok
    )
    return TryLock(parts, options, "skip")


class Lock:
    """Options of a lock; made by ``lock()``."""

    def __init__(self, parts: tuple[Any, ...], options: Options, on_busy: OnBusy) -> None:
        self._parts = parts
        self._options = options
        self._on_busy = on_busy
        # Handles of with statements that are open, a stack for each thread.
        self._open = threading.local()
        if parts:
            name_of(*parts)

    def acquire(self) -> Handle:
        """Take the lock and return its handle; the caller must ``release()`` it.

        In request code use ``with``. Raises what ``lock`` says.
        """
        return Handle(make_key(*self._parts), self._options).acquire(may_begin=False)

    def __enter__(self) -> Handle:
        handle = Handle(make_key(*self._parts), self._options)
        self._take(handle)
        self._stack().append(handle)
        return handle

    def _take(self, handle: Handle) -> None:
        handle.acquire(may_begin=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        handle = self._stack().pop()
        if handle:
            handle.release(error)

    def _stack(self) -> list[Handle]:
        stack: list[Handle] = self._open.__dict__.setdefault("handles", [])
        return stack

    def __call__(self, function: F) -> F:
        """Decorate a function: each call holds the lock, through a handle of its own."""
        refuse_what_outlives_its_call(function)
        name_of = _naming(function, self._parts)

        @functools.wraps(function)
        def locked(*args: Any, **kwargs: Any) -> Any:
            handle = Handle(make_key(*name_of(args, kwargs)), self._options)
            try:
                handle.acquire(may_begin=True)
            except LockNotAvailable as busy:
                return self._answer_busy(busy, args, kwargs)
            with releasing(handle):
                return function(*args, **kwargs)

        return locked  # type: ignore[return-value]

    def _answer_busy(self, busy: LockNotAvailable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._on_busy == "raise":
            raise busy
        return None if self._on_busy == "skip" else self._on_busy(busy, *args, **kwargs)


class TryLock(Lock):
    """Options of a lock that one may not get; made by ``try_lock()``."""

    def acquire(self) -> Handle:
        """Take the lock if it is to be had and return its handle, which is false otherwise."""
        handle = Handle(make_key(*self._parts), self._options)
        with suppress(LockNotAvailable):
            handle.acquire(may_begin=False)
        return handle

    def _take(self, handle: Handle) -> None:
        with suppress(LockNotAvailable):
            handle.acquire(may_begin=True)


class releasing:  # noqa: N801 - reads like contextlib.closing
    """Release a handle at the end of a block, telling it what the block raised."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def __enter__(self) -> Handle:
        return self.handle

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.handle.release(error)


def refuse_what_outlives_its_call(function: Callable[..., Any]) -> None:
    """Raise ``ConfigurationError`` for functions whose work is not over when their call returns."""
    for ask, what in (
        (inspect.iscoroutinefunction, "an async function"),
        (inspect.isasyncgenfunction, "an async generator"),
        (inspect.isgeneratorfunction, "a generator"),
    ):
        if ask(function):
            raise ConfigurationError(
                f"{function.__qualname__} is {what}: its call returns before its work is done, so the lock would be "
                "free while it runs. Take the lock inside it."
            )


def _naming(
    function: Callable[..., Any], parts: tuple[Any, ...]
) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]:
    """Return what makes the parts of the name from a call's arguments."""
    if not parts:
        own = (f"{function.__module__}.{function.__qualname__}",)
        return lambda args, kwargs: own
    if len(parts) > 1 or not isinstance(parts[0], str) or "{" not in parts[0]:
        return lambda args, kwargs: parts
    signature = inspect.signature(function)
    template = KeyTemplate(parts[0], known=signature.parameters, where=f"@lock on {function.__qualname__}")

    def render(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return (template.render(bound.arguments),)

    return render


def seconds_of(timeout: Timeout) -> float | None:
    """Return a timeout as seconds. Raises ``ValueError`` for what is none."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    # The upper bound is PostgreSQL's: lock_timeout is an int of milliseconds.
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= 2_147_483:
        raise ValueError(f"timeout is {timeout!r}; give seconds (0 to 2,147,483), a timedelta, or None to wait.")
    return float(seconds)
