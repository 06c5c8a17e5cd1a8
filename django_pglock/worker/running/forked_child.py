"""A process that a task has forked. It has inherited the worker's memory, with its claims, but none of its threads."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import NoReturn


def end_process(error: BaseException | None) -> NoReturn:
    """End this process at once, with the exit code that Python would give for ``error``.

    A forked child that returns from its task's function must not continue as the worker's thread: it would settle the
    claim of its parent and run what waits in the parent's inbox.
    """
    code = 0
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        code = error.code or 0
    elif error is not None:
        code = 1
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code & 0xFF)
