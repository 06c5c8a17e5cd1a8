"""What can be held: by a with statement, an async with statement, a decorated function, or a handle.

A lockable holds options and no state of a use: it may be made at import and used by many threads and coroutines at
once. Each use takes a handle of its own.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from asgiref.sync import iscoroutinefunction

from django_pglock.errors import ConfigurationError, LockKeyError, LockNotAvailable
from django_pglock.key_template import KeyTemplate
from django_pglock.keys import name_of
from django_pglock.locks.options import OnBusy, on_busy_of

F = TypeVar("F", bound=Callable[..., Any])


class Held(Protocol):
    """A handle of a thread, as far as a lockable knows it."""

    is_held: bool

    def acquire(self, *, may_begin: bool) -> Any: ...

    def release(self, error: BaseException | None = None) -> None: ...


class AsyncHeld(Protocol):
    """A handle of a coroutine, as far as a lockable knows it."""

    is_held: bool

    async def acquire(self) -> Any: ...

    async def release(self, error: BaseException | None = None) -> None: ...


H = TypeVar("H", bound=Held)
A = TypeVar("A", bound=AsyncHeld)


class Lockable(Generic[H, A]):
    """Options of something to hold. Subclasses say what a handle is."""

    def __init__(self, parts: tuple[Any, ...], on_busy: OnBusy) -> None:
        self._parts = parts
        self._on_busy = on_busy_of(on_busy)
        # Handles of with statements that are open, by the thread or coroutine that opened them.
        self._open: dict[Any, list[Any]] = {}
        self._name = self._check(parts)

    def _check(self, parts: tuple[Any, ...]) -> str | int:
        """Return the name that the parts make. Raises ``LockKeyError`` for parts that cannot name anything."""
        return name_of(*parts) if parts else ""

    def _handle(self, parts: tuple[Any, ...]) -> H:
        raise NotImplementedError

    def _async_handle(self, parts: tuple[Any, ...]) -> A:
        raise NotImplementedError

    def _take(self, handle: H, *, may_begin: bool) -> None:
        handle.acquire(may_begin=may_begin)

    async def _atake(self, handle: A) -> None:
        await handle.acquire()

    # Handles

    def acquire(self) -> H:
        """Take it and return its handle; the caller must ``release()`` it. In request code use ``with``."""
        handle = self._handle(self._parts)
        self._take(handle, may_begin=False)
        return handle

    async def aacquire(self) -> A:
        """Take it and return its handle; the caller must ``await handle.release()``."""
        handle = self._async_handle(self._parts)
        await self._atake(handle)
        return handle

    # with, async with

    def __enter__(self) -> H:
        handle = self._handle(self._parts)
        self._take(handle, may_begin=True)
        self._push(threading.get_ident(), handle)
        return handle

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        handle: H = self._pop(threading.get_ident())
        if handle.is_held:
            handle.release(error)

    async def __aenter__(self) -> A:
        handle = self._async_handle(self._parts)
        await self._atake(handle)
        self._push(asyncio.current_task(), handle)
        return handle

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        handle: A = self._pop(asyncio.current_task())
        if handle.is_held:
            await handle.release(error)

    def _push(self, who: Any, handle: Any) -> None:
        self._open.setdefault(who, []).append(handle)

    def _pop(self, who: Any) -> Any:
        stack = self._open[who]
        handle = stack.pop()
        if not stack:
            del self._open[who]
        return handle

    # Decorator

    def __call__(self, function: F) -> F:
        """Decorate a function or a coroutine function: each call holds it, through a handle of its own.

        Raises ``ConfigurationError`` for a generator, and for a task: its decorator belongs above this one.
        """
        if hasattr(function, "enqueue"):
            name = getattr(function, "module_path", function)
            raise ConfigurationError(f"{name} is a task: a worker runs only what is inside. Put @task above the lock.")
        refuse_generators(function)
        naming = self._naming(function)
        decorate = self._decorate_async if iscoroutinefunction(function) else self._decorate
        return decorate(function, naming)  # type: ignore[return-value]

    def _decorate(self, function: Callable[..., Any], naming: Naming) -> Callable[..., Any]:
        @functools.wraps(function)
        def locked(*args: Any, **kwargs: Any) -> Any:
            handle = self._handle(naming(args, kwargs))
            try:
                handle.acquire(may_begin=True)
            except LockNotAvailable as busy:
                return self._answer_busy(busy, args, kwargs)
            with releasing(handle):
                return function(*args, **kwargs)

        return locked

    def _decorate_async(self, function: Callable[..., Any], naming: Naming) -> Callable[..., Any]:
        @functools.wraps(function)
        async def locked(*args: Any, **kwargs: Any) -> Any:
            handle = self._async_handle(naming(args, kwargs))
            try:
                await handle.acquire()
            except LockNotAvailable as busy:
                answer = self._answer_busy(busy, args, kwargs)
                return await answer if inspect.isawaitable(answer) else answer
            async with areleasing(handle):
                return await function(*args, **kwargs)

        return locked

    def _answer_busy(self, busy: LockNotAvailable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._on_busy == "raise":
            raise busy
        return None if self._on_busy == "skip" else self._on_busy(busy, *args, **kwargs)

    def _naming(self, function: Callable[..., Any]) -> Naming:
        """Return what makes the parts of the name from a call's arguments."""
        parts = self._parts
        if not parts:
            own = (f"{function.__module__}.{function.__qualname__}",)
            return lambda args, kwargs: own
        if not any(_has_field(part) for part in parts):
            return lambda args, kwargs: parts
        if (len(parts) > 1 and not self._each_part_is_a_name) or any(isinstance(part, tuple) for part in parts):
            raise LockKeyError(
                f"@lock on {function.__qualname__}: {parts!r} are several parts with a field in one of them. Write "
                'them as one template: "order:{order_id}".'
            )
        return _template_naming(function, parts)

    #: Whether several parts are several names, each of which may be a template.
    _each_part_is_a_name = False


def _has_field(part: Any) -> bool:
    return any(_has_field(each) for each in part) if isinstance(part, tuple) else isinstance(part, str) and "{" in part


Naming = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]


def _template_naming(function: Callable[..., Any], parts: tuple[Any, ...]) -> Naming:
    signature = inspect.signature(function)
    where = f"@lock on {function.__qualname__}"
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
    """Raise ``ConfigurationError`` for functions whose work is not over when their call returns."""
    for ask, what in (
        (inspect.isasyncgenfunction, "an async generator"),
        (inspect.isgeneratorfunction, "a generator"),
    ):
        if ask(function):
            raise ConfigurationError(
                f"{function.__qualname__} is {what}: its call returns before its work is done, so the lock would be "
                "free while it runs. Take the lock inside it."
            )


class releasing:  # noqa: N801 - reads like contextlib.closing
    """Release a handle at the end of a block, telling it what the block raised."""

    def __init__(self, handle: Held) -> None:
        self.handle = handle

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.handle.release(error)


class areleasing:  # noqa: N801 - the same for coroutines
    """Release a coroutine's handle at the end of a block, telling it what the block raised."""

    def __init__(self, handle: AsyncHeld) -> None:
        self.handle = handle

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.handle.release(error)
