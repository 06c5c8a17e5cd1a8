"""Reads tracebacks: finds the project's own frames, the innermost one of them, and the message at the end."""

from __future__ import annotations

import hashlib
import re
from types import TracebackType

#: Frames in files with one of these in their paths are not the project's.
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "/django_pglock/", "<frozen ")
#: A frame. Lines of an exception group begin with a bar, and those of the exceptions in the group with more spaces.
_FRAME = re.compile(r'^(?:  \|)? +File "([^"\n]+)", line (\d+)', re.MULTILINE)
#: Characters of a message that are shown.
LONGEST_MESSAGE = 500


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
