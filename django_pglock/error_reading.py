"""Reads exceptions of the project's functions, whatever their classes do.

Each attribute of an exception may be a property that raises, also ``__class__``, ``__cause__`` and ``__traceback__``,
and so may the attributes of its class, by a metaclass. ``__getattribute__`` may raise for all of them. So the functions
here read the fields of Python's own objects, and catch what other attributes raise.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from types import TracebackType, UnionType
from typing import Any

from django_pglock.errors import TaskTimeout

_FIELDS: Any = vars(BaseException)
_CLASS_FIELDS: Any = vars(type)


def is_a(error: BaseException, kinds: type[BaseException] | tuple[type[BaseException], ...] | UnionType) -> bool:
    """Return whether an exception is of one of these classes. ``isinstance()`` also reads its ``__class__``."""
    return issubclass(type(error), kinds)


def trace_of(error: BaseException) -> TracebackType | None:
    """Return the traceback of an exception."""
    trace: TracebackType | None = _FIELDS["__traceback__"].__get__(error)
    return trace


def set_trace(error: BaseException, trace: TracebackType | None) -> None:
    """Set the traceback of an exception."""
    _FIELDS["__traceback__"].__set__(error, trace)


def cause_of(error: BaseException) -> BaseException | None:
    """Return the exception after ``from``."""
    cause: BaseException | None = _FIELDS["__cause__"].__get__(error)
    return cause


def context_of(error: BaseException) -> BaseException | None:
    """Return the exception that was handled when this one was raised."""
    context: BaseException | None = _FIELDS["__context__"].__get__(error)
    return context


def class_name_of(error: BaseException) -> str:
    """Return the qualified name of an exception's class."""
    name: str = _CLASS_FIELDS["__qualname__"].__get__(type(error))
    return name


def class_path_of(error: BaseException) -> str:
    """Return the module and the qualified name of an exception's class."""
    module = _CLASS_FIELDS["__module__"].__get__(type(error))
    # The class may have any attribute of this name.
    return f"{module}.{class_name_of(error)}" if type(module) is str else class_name_of(error)


def attribute_of(owner: object, name: str) -> Any:
    """Return an attribute of an object; None if it has none, or if the project's code that reads it raises."""
    try:
        return getattr(owner, name, None)
    except BaseException as broken:
        if is_sent(broken):
            raise
        return None


def text_of(error: BaseException) -> str:
    """Return the message of an exception, or why there is none."""
    try:
        return str(error).strip()
    except BaseException as broken:
        if is_sent(broken):
            raise
        return f"its message cannot be read ({class_name_of(broken)})"


def following(error: BaseException) -> BaseException | None:
    """Return the cause of an exception, or else its context."""
    # Not by its truth: an exception with a length of 0 is false.
    cause = cause_of(error)
    return context_of(error) if cause is None else cause


def sqlstate_of(error: BaseException | None) -> str | None:
    """Return the code of an error of the server; None for other exceptions."""
    found = attribute_of(error, "sqlstate")
    return found if type(found) is str else None


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its causes and contexts, and the exceptions of exception groups."""
    # Causes may be a circle: an exception can be the cause of its own cause.
    seen: set[int] = set()
    left: list[object] = [error]
    while left:
        each = left.pop()
        if issubclass(type(each), BaseException) and id(each) not in seen:
            seen.add(id(each))
            found: Any = each
            yield found
            members = attribute_of(found, "exceptions")
            left += members if type(members) in (tuple, list) else ()
            left += [cause_of(found), context_of(found)]


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception as Python prints it; if that fails, the frames and the message alone."""
    try:
        return "".join(traceback.format_exception(error))
    except BaseException as broken:
        if is_sent(broken):
            raise
        return _plain_traceback_of(error, class_name_of(broken))


def _plain_traceback_of(error: BaseException, broken: str) -> str:
    parts: list[str] = []
    for each in _line_of(error):
        frames = traceback.format_tb(trace_of(each))
        start = ["Traceback (most recent call last):\n", *frames] if frames else []
        message = text_of(each) or f"this exception cannot be printed ({broken})"
        name = class_path_of(each).removeprefix("builtins.")
        parts.append("".join([*start, f"{name}: {message}\n"]))
    return "\nThe above exception came before the following exception:\n\n".join(reversed(parts))


def _line_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its cause or context, the cause or context of this one, and so on."""
    # Causes may be a circle: an exception can be the cause of its own cause.
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = following(each)


def is_printable(error: BaseException) -> bool:
    """Return whether Python can print an exception."""
    try:
        traceback.format_exception(error)
    except BaseException as broken:
        if is_sent(broken):
            raise
        return False
    return True


def one_line(error: BaseException) -> str:
    """Return the message of an exception on one line, for log records. Those of PostgreSQL often have several lines."""
    return " ".join(text_of(error).split())


def is_sent(error: BaseException) -> bool:
    """Return whether this exception was sent into the current thread, and not raised by the code that runs there.

    The worker sends ``TaskTimeout``. Python raises KeyboardInterrupt in the main thread.
    """
    return is_a(error, TaskTimeout) or (is_a(error, KeyboardInterrupt) and is_main_thread())


def is_main_thread() -> bool:
    """Return whether this is the thread in which signal handlers run, and may raise exceptions."""
    return threading.get_ident() == threading.main_thread().ident
