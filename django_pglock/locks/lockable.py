"""What can be held: by a with statement, an async with statement, a decorated function, or a handle.

A lockable holds options and no state of a use: it may be made at import and used by many threads and coroutines at
once. Each use takes a handle of its own.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from asgiref.sync import iscoroutinefunction

from django_pglock.errors import ConfigurationError, LockError, LockKeyError, LockNotAvailable
from django_pglock.keys import name_of
from django_pglock.keys.template import KeyTemplate
from django_pglock.locks.options import OnBusy, on_busy_of

F = TypeVar("F", bound=Callable[..., Any])


class Held(Protocol):
    """A handle of a thread, as far as a lockable knows it."""

    is_open: bool

    def acquire(self, *, may_begin: bool) -> Any: ...

    def release(self, error: BaseException | None = None) -> None: ...

    def free_from_elsewhere(self) -> None: ...


class AsyncHeld(Protocol):
    """A handle of a coroutine, as far as a lockable knows it."""

    is_open: bool

    async def acquire(self) -> Any: ...

    async def release(self, error: BaseException | None = None) -> None: ...


H = TypeVar("H", bound=Held)
A = TypeVar("A", bound=AsyncHeld)


class Lockable(Generic[H, A]):
    """Options of something to hold. Subclasses say what a handle is."""

    def __init__(self, parts: tuple[Any, ...], on_busy: OnBusy) -> None:
        self._parts = parts
        self._on_busy = on_busy_of(on_busy)
        self._open = OpenBlocks()
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
        try:
            self._take(handle, may_begin=True)
            self._open.add(_caller(), threading.get_ident(), handle)
            return handle  # noqa: TRY300 - an exception that comes from outside may come here, too
        except BaseException:
            self._open.discard(handle)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            handle, is_elsewhere = self._open.find(_caller(), threading.get_ident())
        except BaseException:
            # Whoever is dropped frees its lock.
            self._open.discard(self._open.find(_caller(), threading.get_ident())[0])
            raise
        try:
            if handle.is_open and is_elsewhere:
                # A generator that another thread closes, or Python's garbage collector.
                handle.free_from_elsewhere()
            elif handle.is_open:
                handle.release(error)
        finally:
            self._open.discard(handle)

    async def __aenter__(self) -> A:
        handle = self._async_handle(self._parts)
        try:
            await self._atake(handle)
            self._open.add(_caller(), asyncio.current_task(), handle)
        except BaseException:
            self._open.discard(handle)
            raise
        return handle

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An asynchronous generator that nobody goes on with is closed by another task.
        handle, _ = self._open.find(_caller(), asyncio.current_task())
        try:
            if handle.is_open:
                await handle.release(error)
        finally:
            self._open.discard(handle)

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
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                handle.release(error)
                raise
            handle.release()
            return result

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
            try:
                result = await function(*args, **kwargs)
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


def _caller() -> int:
    """Return which frame the with statement is in that calls our method; ``NO_FRAME`` if others enter for it."""
    frame = sys._getframe(2)  # noqa: SLF001 - inspect.currentframe() is the same, and ten times slower
    return NO_FRAME if frame.f_globals.get("__name__") == "contextlib" else id(frame)


#: The frame of ``ExitStack`` and the like, which is not there any more when the block ends.
NO_FRAME = 0


class OpenBlocks:
    """The handles of a lockable's with statements that are open.

    A block belongs to the frame whose statement it is: that is the same at its end, also where a generator is closed by
    another thread or task. Where somebody else enters and leaves for it (``ExitStack``), it is the latest one of the
    thread or task.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[int, Any, Any]] = []

    def add(self, frame: int, who: Any, handle: Any) -> None:
        """Note that a block begins."""
        if self._blocks:
            # Those that were interrupted after their end have stayed.
            for each in [each for each in self._blocks if each[2].is_done]:
                self._forget(each)
        self._blocks.append((frame, who, handle))

    def discard(self, handle: Any) -> None:
        """Forget a block that has ended, or has not begun after all."""
        for each in [each for each in self._blocks if each[2] is handle]:
            self._forget(each)

    def _forget(self, block: tuple[int, Any, Any]) -> None:
        # One operation, and so are the others: several threads may come here at once.
        try:  # noqa: SIM105 - as in holds.py
            self._blocks.remove(block)
        except ValueError:
            pass

    def find(self, frame: int, who: Any) -> tuple[Any, bool]:
        """Return the handle of the block that ends, and whether it ends elsewhere than it began."""
        blocks = self._blocks[::-1]
        if blocks and frame != NO_FRAME and blocks[0][:2] == (frame, who):
            return blocks[0][2], False
        of_frame = [each for each in blocks if each[0] == frame] if frame != NO_FRAME else []
        of_nobody = [each for each in blocks if each[0] == NO_FRAME]
        found = (
            next((each for each in of_frame if each[1] == who), None)
            or next(iter(of_frame), None)
            or next((each for each in of_nobody if each[1] == who), None)
            or (of_nobody[0] if len(of_nobody) == 1 else None)
            or next((each for each in blocks if each[1] == who), None)
            or (blocks[0] if len(blocks) == 1 else None)
        )
        if found is None:
            raise LockError("This with block ends in another thread or task than it began in, as others did.")
        return found[2], found[1] != who


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
