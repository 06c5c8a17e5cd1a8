"""A process that a task has forked. It has the worker's memory with its claims, but none of its other threads."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, NoReturn

from django_pglock.error_reading import traceback_of

#: The number of forks from the process that has imported this module to this process. It is compared before and after
#: each task, because that is several times faster than to compare process ids.
generation = 0


def _after_fork_in_child() -> None:
    global generation
    generation += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def end_process(error: BaseException | None) -> NoReturn:
    """End this process at once, with the exit code that Python would use for ``error``.

    A forked child that returns from the task's function must not continue as a thread of the worker. It would settle
    the claim of its parent, and run the claims in the parent's inbox.
    """
    code = 0 if error is None else 1
    try:
        if error is not None:
            status: Any = error.code if isinstance(error, SystemExit) else error
            if status is None or isinstance(status, int):
                code = int(status or 0)
            else:
                sys.stderr.write(traceback_of(error))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
    finally:
        # Also if the streams of the project raise.
        os._exit(code & 0xFF)
