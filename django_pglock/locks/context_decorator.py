"""The ways to use locks and leases: with, async with, as a decorator, or by a handle.

A ``ContextDecorator`` has only options. So it may be made at import, and many threads and coroutines may use it at the
same time. Each use has its own handle.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation

from django_pglock.errors import ConfigurationError, LockKeyError, LockNotAvailable
from django_pglock.keys import name_of
from django_pglock.keys.template import KeyTemplate
from django_pglock.locks.open_blocks import OpenBlocks, caller
from django_pglock.locks.options import OnBusy, checked_on_busy

F = TypeVar("F", bound=Callable[..., Any])


class HandleProtocol(Protocol):
    """The handle of a thread."""

    is_open: bool

    def acquire(self, *, may_begin: bool) -> Any: ...

    def release(self, error: BaseException | None = None) -> None: ...

    def free_from_any_thread(self) -> None: ...


class AsyncHandleProtocol(Protocol):
    """The handle of a coroutine."""

    is_open: bool

    async def acquire(self) -> Any: ...

    async def release(self, error: BaseException | None = None) -> None: ...


H = TypeVar("H", bound=HandleProtocol)
A = TypeVar("A", bound=AsyncHandleProtocol)


class ContextDecorator(Generic[H, A]):
    """The options of a lock or a lease. Subclasses make the handles."""

    def __init__(self, parts: tuple[Any, ...], on_busy: OnBusy) -> None:
        self._parts = parts
        self._on_busy = checked_on_busy(on_busy)
        self._open = OpenBlocks()
        self._name = self._check(parts)

    def _check(self, parts: tuple[Any, ...]) -> str | int:
        """Return the name for the parts. Raises ``LockKeyError`` for invalid parts."""
        return name_of(*parts) if parts else ""

    def _handle(self, parts: tuple[Any, ...]) -> H:
        raise NotImplementedError

    def _async_handle(self, parts: tuple[Any, ...]) -> A:
        raise NotImplementedError

    def _acquire(self, handle: H, *, may_begin: bool) -> None:
        handle.acquire(may_begin=may_begin)

    async def _aacquire(self, handle: A) -> None:
        await handle.acquire()

    def _check_without_call(self) -> None:
        """Raise ``ConfigurationError`` for ``on_busy`` without a decorated function: nothing can be skipped."""
        if self._on_busy != "raise":
            where = f"{self._name!r}: " if self._parts else ""
            raise ConfigurationError(
                f"{where}on_busy is for decorated functions. A block cannot be skipped: catch LockNotAvailable, "
                "or write try_lock instead of lock."
            )

    # Handles

    def acquire(self) -> H:
        """Acquire and return the handle; the caller must ``release()`` it. In request code use ``with``."""
        self._check_without_call()
        handle = self._handle(self._parts)
        self._acquire(handle, may_begin=False)
        return handle

    async def aacquire(self) -> A:
        """Acquire and return the handle; the caller must ``await handle.release()``."""
        self._check_without_call()
        handle = self._async_handle(self._parts)
        await self._aacquire(handle)
        return handle

    # with, async with

    def __enter__(self) -> H:
        self._check_without_call()
        handle = self._handle(self._parts)
        try:
            self._acquire(handle, may_begin=True)
            self._open.add(caller(), threading.get_ident(), handle)
            return handle  # noqa: TRY300 - a signal handler may raise here, too
        except BaseException:
            self._open.discard(handle)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            handle, is_elsewhere = self._open.find(caller(), threading.get_ident())
        except BaseException:
            # The handle frees its lock when it is dropped.
            self._open.discard(self._open.find(caller(), threading.get_ident())[0])
            raise
        try:
            if handle.is_open and is_elsewhere:
                # Another thread, or Python's garbage collector, closes a generator.
                handle.free_from_any_thread()
            elif handle.is_open:
                handle.release(error)
        finally:
            self._open.discard(handle)

    async def __aenter__(self) -> A:
        self._check_without_call()
        handle = self._async_handle(self._parts)
        try:
            await self._aacquire(handle)
            self._open.add(caller(), asyncio.current_task(), handle)
        except BaseException:
            self._open.discard(handle)
            raise
        return handle

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Another task closes an asynchronous generator that was not run to its end.
        handle, _ = self._open.find(caller(), asyncio.current_task())
        try:
            if handle.is_open:
                await handle.release(error)
        finally:
            self._open.discard(handle)

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
        self, function: Callable[..., Any], naming: Naming, keeps: Callable[[H, Any], bool] | None = None
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
            handle = self._handle(parts)
            try:
                handle.acquire(may_begin=True)
            except LockNotAvailable as busy:
                return self._answer_busy(busy, args, kwargs)
            try:
                result = function(*args, **kwargs)
                if keeps is not None and keeps(handle, result):
                    return result
            except BaseException as error:
                handle.release(error)
                raise
            handle.release()
            return result

        return locked

    def _decorate_async(
        self, function: Callable[..., Any], naming: Naming, keeps: Callable[[A, Any], bool] | None = None
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
            handle = self._async_handle(parts)
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

    #: Whether several parts are several names, each of which may be a template.
    _each_part_is_a_name = False


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
        (inspect.isasyncgenfunction, "an async generator"),
        (inspect.isgeneratorfunction, "a generator"),
    ):
        if ask(function):
            raise ConfigurationError(
                f"{_called(function)} is {what}: its call returns before its body runs, so the lock would not be "
                "held while the body runs. Take the lock inside the function."
            )
