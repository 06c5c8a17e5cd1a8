"""The ways to use locks and leases: with, async with, as a decorator, or by a handle.

A lock object has only options. So it may be made at import, and many threads and coroutines may use it at the same
time. Each use has its own handle.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation

from django_pglock.errors import ConfigurationError, LockError, LockKeyError, LockNotAvailable
from django_pglock.keys import key_of, make_key, name_of
from django_pglock.keys.template import KeyTemplate
from django_pglock.locks.coroutines import AsyncHandle
from django_pglock.locks.handle import Handle
from django_pglock.locks.request import FOREIGN_OPTIONS, OnBusy, Request, in_order

F = TypeVar("F", bound=Callable[..., Any])
#: PostgreSQL stores the locks of all sessions in one table in shared memory. Thousands of locks in one call could fill
#: it, and then no client can connect.
MOST_KEYS = 1000


class Lock:
    """The options of a lock; made by ``lock()``. Subclasses have other keys or other handles."""

    #: Whether an acquire without a decorated function may fail without an error.
    _may_fail = False
    #: What makes a handle from a request.
    _handle: Callable[[Request], Any] = Handle
    _async_handle: Callable[[Request], Any] = AsyncHandle
    #: Whether several parts are several names, each of which may be a template.
    _each_part_is_a_name = False

    def __init__(self, parts: tuple[Any, ...], request: Request, on_busy: OnBusy) -> None:
        if not (on_busy in ("raise", "skip") or callable(on_busy)):
            raise ValueError(f"on_busy is {on_busy!r}; give 'raise', 'skip' or a function.")
        self._parts = parts
        self._request = request
        self._on_busy = on_busy
        #: The blocks that are open: the thread or task, and the handle.
        self._open: list[tuple[Any, Any]] = []
        self._name = self._check(parts)

    def _check(self, parts: tuple[Any, ...]) -> str | int:
        """Return the name for the parts. Raises ``LockKeyError`` for invalid parts."""
        return name_of(*parts) if parts else ""

    def _request_for(self, parts: tuple[Any, ...]) -> Request:
        """Return the request for the parts of a name."""
        key = key_of(self._name) if parts is self._parts and parts else make_key(*parts)
        return self._request._replace(keys=(key,))

    # Handles

    def acquire(self, **options: Any) -> Handle:
        """Acquire and return the handle; the caller must ``release()`` it. In request code use ``with``."""
        refuse_options(options)
        return self._acquire(may_begin=False)

    def _acquire(self, *, may_begin: bool) -> Handle:
        handle: Handle = self._new_handle(self._handle)
        try:
            handle.acquire(may_begin=may_begin)
        except LockNotAvailable:
            if not self._may_fail:
                raise
        return handle

    async def aacquire(self, **options: Any) -> AsyncHandle:
        """Acquire and return the handle; the caller must ``await handle.release()``."""
        refuse_options(options)
        handle: AsyncHandle = self._new_handle(self._async_handle)
        try:
            await handle.acquire()
        except LockNotAvailable:
            if not self._may_fail:
                raise
        return handle

    def _new_handle(self, make: Callable[[Request], Any]) -> Any:
        """Return a handle of a block. Raises ``ConfigurationError`` for ``on_busy``: a block cannot be skipped."""
        if self._on_busy != "raise" and not self._may_fail:
            where = f"{self._name!r}: " if self._parts else ""
            raise ConfigurationError(
                f"{where}on_busy is for decorated functions. A block cannot be skipped: catch LockNotAvailable, "
                "or write try_lock instead of lock."
            )
        return make(self._request_for(self._parts))

    # with, async with

    def __enter__(self) -> Handle:
        handle = self._acquire(may_begin=True)
        try:
            self._open.append((threading.get_ident(), handle))
            return handle  # noqa: TRY300 - a signal handler may raise here, too
        except BaseException:
            self._discard(handle)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        handle = None
        try:
            owner, handle = self._ending(threading.get_ident())
            if handle.is_open and owner != threading.get_ident():
                # Another thread, or Python's garbage collector, closes a generator.
                handle.free_from_any_thread()
            elif handle.is_open:
                handle.release(error)
        finally:
            # If this was interrupted before the release, the handle frees its lock when it is dropped.
            if handle is None:
                _, handle = self._ending(threading.get_ident())
            self._discard(handle)

    async def __aenter__(self) -> AsyncHandle:
        handle = await self.aacquire()
        self._open.append((asyncio.current_task(), handle))
        return handle

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Another task closes an asynchronous generator that was not run to its end.
        _, handle = self._ending(asyncio.current_task())
        try:
            if handle.is_open:
                await handle.release(error)
        finally:
            self._discard(handle)

    def _ending(self, who: Any) -> tuple[Any, Any]:
        """Return the block that ends: the latest one of this thread or task, or the only one, which began elsewhere.

        All handles of one object have the same name. So if generators end in another order than they began, their locks
        are freed as often as they were taken.
        """
        blocks = self._open[::-1]
        for block in blocks:
            if block[0] == who:
                return block
        if len(blocks) != 1:
            raise LockError("This with block and others end in another thread or asyncio task than they began in.")
        return blocks[0]

    def _discard(self, handle: Any) -> None:
        """Remove a block that has ended or could not begin, and blocks whose end was interrupted after the release."""
        # Several threads may run this at the same time. All changes are single, atomic operations.
        for block in self._open[:]:
            if block[1] is handle or block[1].is_done:
                with suppress(ValueError):
                    self._open.remove(block)

    # Decorator

    def __call__(self, function: F) -> F:
        """Decorate a function or a coroutine function: each call holds the lock, with its own handle.

        Raises ``ConfigurationError`` for a generator, and for a task or a ``classmethod``: its decorator belongs above
        this one. Raises ``LockKeyError`` if the name of the lock cannot be made from the function.
        """
        if hasattr(function, "enqueue"):
            name = getattr(function, "module_path", function)
            raise ConfigurationError(
                f"{name} is a task, and a worker would run it without this lock. Put @task above the lock."
            )
        if isinstance(function, staticmethod) or not callable(function):
            kind = type(function).__name__
            hint = f" Put @{kind} above the lock." if hasattr(function, "__get__") else ""
            raise ConfigurationError(f"A lock decorates functions, not objects of the type {kind}.{hint}")
        # An object may be async by its class.
        is_async = iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__)
        decorate = self._decorate_async if is_async else self._decorate
        return decorate(function, self._naming(function))  # type: ignore[return-value]

    def _decorate(
        self, function: Callable[..., Any], naming: Naming, keeps: Callable[[Any, Any], bool] | None = None
    ) -> Callable[..., Any]:
        """Return a function that calls ``function`` while it holds the lock. Each call has its own handle.

        ``keeps`` gets the handle and the result of a call. It returns whether the result owns the handle from now on.
        """
        refuse_generators(function)

        @functools.wraps(function)
        def locked(*args: Any, **kwargs: Any) -> Any:
            parts = naming(args, kwargs)
            if parts is None:
                return function(*args, **kwargs)
            handle = self._handle(self._request_for(parts))
            try:
                handle.acquire(may_begin=True)
            except LockNotAvailable as busy:
                return self._answer_busy(busy, args, kwargs)
            try:
                result = function(*args, **kwargs)
                if inspect.iscoroutine(result):
                    result.close()
                    raise _early_return(function, "returned a coroutine")  # noqa: TRY301 - the lock is released below
                if keeps is not None and keeps(handle, result):
                    return result
            except BaseException as error:
                handle.release(error)
                raise
            handle.release()
            return result

        return locked

    def _decorate_async(
        self, function: Callable[..., Any], naming: Naming, keeps: Callable[[Any, Any], bool] | None = None
    ) -> Callable[..., Any]:
        """Do the same as ``_decorate``, for a coroutine function."""
        refuse_generators(function)

        @functools.wraps(function)
        async def locked(*args: Any, **kwargs: Any) -> Any:
            try:
                parts = naming(args, kwargs)
            except SynchronousOnlyOperation:
                # In a thread, because a field of the name may be read from the database, such as request.user.
                parts = await sync_to_async(naming)(args, kwargs)
            if parts is None:
                return await function(*args, **kwargs)
            handle = self._async_handle(self._request_for(parts))
            try:
                await handle.acquire()
            except LockNotAvailable as busy:
                answer = self._answer_busy(busy, args, kwargs)
                return await answer if inspect.isawaitable(answer) else answer
            try:
                result = await function(*args, **kwargs)
                if keeps is not None and keeps(handle, result):
                    return result
            except BaseException as error:
                await handle.release(error)
                raise
            await handle.release()
            return result

        return locked

    def _answer_busy(self, busy: LockNotAvailable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._on_busy == "raise":
            raise busy
        return None if self._on_busy == "skip" else self._on_busy(busy, *args, **kwargs)

    def _naming(self, function: Callable[..., Any]) -> Naming:
        """Return the function that computes the parts of the name from the arguments of a call."""
        parts = self._parts
        if not parts:
            if not hasattr(function, "__qualname__"):
                raise LockKeyError(f"{function!r} has no dotted path that could name the lock. Write @lock('name').")
            own = (f"{function.__module__}.{function.__qualname__}",)
            return lambda args, kwargs: own
        if not any(_has_field(part) for part in parts):
            return lambda args, kwargs: parts
        if (len(parts) > 1 and not self._each_part_is_a_name) or any(isinstance(part, tuple) for part in parts):
            raise LockKeyError(
                f"@lock on {_called(function)}: {parts!r} are several parts, and one contains a field. Write "
                'them as one template: "order:{order_id}".'
            )
        return _template_naming(function, parts)


class TryLock(Lock):
    """Options of a lock whose acquire may fail without an error; made by ``try_lock()``. The handle is false then."""

    _may_fail = True


class LockAll(Lock):
    """Options of several locks; made by ``lock_all()``."""

    _each_part_is_a_name = True

    def _check(self, parts: tuple[Any, ...]) -> str:
        if not 0 < len(parts) <= MOST_KEYS:
            raise LockKeyError(f"lock_all was given {len(parts)} names; it takes 1 to {MOST_KEYS}.")
        return ", ".join(str(name_of(*_parts_of(name))) for name in parts)

    def _request_for(self, parts: tuple[Any, ...]) -> Request:
        return self._request._replace(keys=in_order([make_key(*_parts_of(name)) for name in parts]))


class Semaphore(Lock):
    """Options of a semaphore; made by ``semaphore()``."""

    def __init__(self, parts: tuple[Any, ...], request: Request, on_busy: OnBusy, limit: int) -> None:
        super().__init__(parts, request, on_busy)
        self._limit = limit

    def _request_for(self, parts: tuple[Any, ...]) -> Request:
        name = name_of(*parts)
        slots = in_order([make_key(f"{name}#{number}") for number in range(1, self._limit + 1)])
        return self._request._replace(keys=slots, queue=make_key(f"{name}#queue"))


def _parts_of(name: Any) -> tuple[Any, ...]:
    return name if isinstance(name, tuple) else (name,)


def refuse_options(options: dict[str, Any]) -> None:
    """Raise ``TypeError`` for options of an acquire."""
    for name in options:
        meant = f"; write {FOREIGN_OPTIONS[name]}" if name in FOREIGN_OPTIONS else ""
        raise TypeError(
            f"acquire() has no option {name!r}{meant}. A lock has its options before: lock(…, timeout=1).acquire()."
        )


def _called(function: Callable[..., Any]) -> str:
    """Return what messages call a function. A partial function has no name, nor has an object with ``__call__``."""
    return str(getattr(function, "__qualname__", function))


def _has_field(part: Any) -> bool:
    return any(_has_field(each) for each in part) if isinstance(part, tuple) else isinstance(part, str) and "{" in part


#: A function that computes the parts of the name from the arguments of a call; None: the call is not locked.
Naming = Callable[[tuple[Any, ...], dict[str, Any]], "tuple[Any, ...] | None"]


def _template_naming(function: Callable[..., Any], parts: tuple[Any, ...]) -> Naming:
    signature = inspect.signature(function)
    where = f"@lock on {_called(function)}"
    templates = [
        KeyTemplate(part, known=signature.parameters, where=where) if isinstance(part, str) and "{" in part else part
        for part in parts
    ]

    def render(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(each.render(bound.arguments) if isinstance(each, KeyTemplate) else each for each in templates)

    return render


def refuse_generators(function: Callable[..., Any]) -> None:
    """Raise ``ConfigurationError`` for functions whose call returns before their body has run."""
    for ask, what in (
        (inspect.isasyncgenfunction, "is an async generator"),
        (inspect.isgeneratorfunction, "is a generator"),
    ):
        if ask(function):
            raise _early_return(function, what)


def _early_return(function: Callable[..., Any], what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{_called(function)} {what}: its call returns before its body runs, so the lock would not be held while the "
        "body runs. Take the lock inside the function."
    )
