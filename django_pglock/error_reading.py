"""Reads exceptions of the project's functions. A ``__str__`` that raises must not cost a task its outcome."""

from __future__ import annotations

import traceback


def class_path_of(error: BaseException) -> str:
    """Return the module and the qualified name of an exception's class."""
    return f"{type(error).__module__}.{type(error).__qualname__}"


def one_line(error: BaseException) -> str:
    """Return the message of an exception on one line, or why there is none. PostgreSQL's often have several lines."""
    try:
        return " ".join(str(error).split())
    except Exception as broken:  # noqa: BLE001 - the code of the project
        return f"its message cannot be read ({type(broken).__qualname__})"


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an exception as Python prints it; if that fails, its class and its message."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - the code of the project
        return f"{class_path_of(error)}: {one_line(error)}\n"


def following(error: BaseException) -> BaseException | None:
    """Return the cause of an exception, or else its context."""
    # Not by its truth: an exception with a length of 0 is false.
    return error.__context__ if error.__cause__ is None else error.__cause__
