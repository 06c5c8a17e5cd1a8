"""Reads exceptions of the project's functions, whatever their classes do.

Each attribute of an exception may be a property that raises, also ``__class__``, ``__cause__`` and ``__traceback__``,
and so may the attributes of its class, by a metaclass. ``__getattribute__`` may raise for all of them. So the functions
here read the fields of Python's own objects, and catch what other attributes raise.
"""

from __future__ import annotations

import threading
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


def attribute_of(error: BaseException, name: str) -> Any:
    """Return an attribute of an exception; None if it has none, or if the project's code that reads it raises."""
    try:
        return getattr(error, name, None)
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


def is_sent(error: BaseException) -> bool:
    """Return whether other code may have sent this exception into the current thread, at any of its instructions.

    The worker sends ``TaskTimeout``. Signal handlers raise KeyboardInterrupt and SystemExit in the main thread.
    """
    if is_a(error, Exception):
        return is_a(error, TaskTimeout)
    return threading.get_ident() == threading.main_thread().ident
