"""Reads exceptions of the project's functions, and their tracebacks.

A ``__str__`` that raises must not cost a task its outcome. Nor must a text that PostgreSQL cannot store: it is changed
until it can be stored, because the function has run.
"""

from __future__ import annotations

import hashlib
import re
import traceback
from types import TracebackType

#: Frames in files with one of these in their paths are not the project's.
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "/django_pglock/", "<frozen ")
#: A frame. Lines of an exception group begin with a bar, and those of the exceptions in the group with more spaces.
_FRAME = re.compile(r'^(?:  \|)? +File "([^"\n]+)", line (\d+)', re.MULTILINE)
#: Characters of a message that are shown.
LONGEST_MESSAGE = 500
#: The largest number of characters of a traceback or message that are stored.
MAX_TEXT = 60_000
#: Characters of a message in the log.
MAX_MESSAGE = 300
#: Width of the column for the dotted path of an exception.
MAX_PATH = 512


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


def storable(text: str) -> str:
    """Return ``text`` so that PostgreSQL can store it: without NUL and lone surrogates, and shortened in the middle."""
    if len(text) > MAX_TEXT:
        half = MAX_TEXT // 2
        text = f"{text[:half]}\n… {len(text) - MAX_TEXT:,} characters left out …\n{text[-half:]}"
    return text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()


def describe_exception(error: BaseException) -> tuple[str, str]:
    """Return the path of an exception's class and its traceback, both storable, even if its ``__str__`` raises."""
    return storable(class_path_of(error))[:MAX_PATH], storable(traceback_of(error))


def message_of(error: BaseException) -> str:
    """Return the class and the text of an exception on one line, even if its ``__str__`` raises."""
    text, name = one_line(error), type(error).__qualname__
    text = "".join(each if each.isprintable() else "\ufffd" for each in text[:MAX_MESSAGE])
    return storable(f"{name}: {text}" if text else name)


def is_own(file: str) -> bool:
    """Return whether a file belongs to the project, not to a library."""
    return not any(each in file for each in _LIBRARIES)


def message_in(trace: str, exception: str) -> str:
    """Return the message in the last line of a traceback that names the exception; empty if there is none."""
    name = exception.rpartition(".")[2]
    for line in reversed(trace.splitlines()):
        start, _, message = line.removeprefix("  | ").partition(": ")
        if start.rpartition(".")[2] == name:
            return message[:LONGEST_MESSAGE]
    return ""


def place_in(trace: str) -> str:
    """Return the last own frame of a traceback, such as ``bank.py:88``; without own frames, the last frame."""
    frames = _FRAME.findall(trace)
    own = [frame for frame in frames if is_own(frame[0])]
    for file, line in (own or frames)[-1:]:
        return f"{file.rpartition('/')[2]}:{line}"
    return ""


def function_of(trace: TracebackType | None) -> str:
    """Return the module and the function of the last own frame; without own frames, of the last frame.

    Not the file, whose path differs from host to host and from release to release, and not the line, which moves with
    each change of the file.
    """
    last, last_own = "", ""
    while trace is not None:
        code = trace.tb_frame.f_code
        last = f"{trace.tb_frame.f_globals.get('__name__')}:{code.co_name}"
        if is_own(code.co_filename):
            last_own = last
        trace = trace.tb_next
    return last_own or last


def fingerprint_of(task_path: str, exception_path: str, place: str = "") -> int:
    """Return a number of 63 bits: it fits into a ``bigint``, and people can type it without a sign.

    ``place`` is the module and the function of the last own frame. It is empty if no traceback is known.
    """
    text = f"{task_path}\n{exception_path}\n{place}"
    return int.from_bytes(hashlib.sha256(text.encode(errors="backslashreplace")).digest()[:8], "big") >> 1
