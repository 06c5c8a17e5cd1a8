"""A process that a task has forked: no worker, although it has inherited one, with its claims, without its threads."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import NoReturn


def end_here(error: BaseException | None) -> NoReturn:
    """End this process at once, with the exit code that Python would give for ``error``.

    A forked one, when it comes back out of its task's function, must not go on as the worker's thread: it would settle
    its parent's claim, and run what waits in its inbox.
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
