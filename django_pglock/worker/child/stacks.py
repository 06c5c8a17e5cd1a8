"""The stack of a running task, as text: files, lines, functions and source lines, but no values of variables.

Another thread reads the frames. It needs the GIL only for a moment, so it can read the stack of a function that
computes in Python. If C code keeps the GIL, the stack is read when that code returns.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import dropwhile, islice
from traceback import StackSummary, walk_stack
from types import FrameType
from typing import Any

from django_pglock.error_reading import storable

#: From 3.12 on, Python collects garbage only between two bytecodes.
COLLECTS_ANYWHERE = sys.version_info < (3, 12)
#: The number of innermost frames that are read of a stack, and of last characters of the text that are kept.
MOST_FRAMES, MOST_CHARACTERS = 200, 30_000
#: The modules of the outermost frames, which are the same for each task and are left out.
_WAY_TO_TASKS = ("threading", "concurrent.futures.thread", "asyncio.", "asgiref.", "django_pglock.worker.")


@contextmanager
def stacks() -> Iterator[dict[int, FrameType]]:
    """Return the innermost frame of each thread, by the ident of the thread. Read the frames only in this block.

    Before Python 3.12, the creation of a frame object may start a garbage collection, and a finalizer may let other
    threads run. Then the frame may end before the new object refers to it, and Python reads freed memory. So garbage
    collection is off in this block.
    """
    is_paused = COLLECTS_ANYWHERE and gc.isenabled()
    if is_paused:
        gc.disable()
    try:
        yield sys._current_frames()  # noqa: SLF001 - there is no other name for it
    finally:
        if is_paused:
            gc.enable()


def stack_text(innermost: FrameType | None) -> str:
    """Return the stack of a thread as text, the most recent call last. Empty: the thread has ended."""
    # Without the check, walk_stack() would read the stack of the caller.
    return "" if innermost is None else _text(frame for frame, _ in walk_stack(innermost))


def coroutine_text(coroutine: Any) -> str:
    """Return the stack of a suspended coroutine as text: the coroutine, the one that it awaits, and so on."""
    return _text(reversed(list(islice(_inwards(coroutine), MOST_FRAMES))))


def _text(frames: Iterable[FrameType]) -> str:
    """Return frames as text. The innermost frame comes first."""
    found = list(islice(frames, MOST_FRAMES))[::-1]
    own = list(dropwhile(_leads_to_task, found)) or found
    text = "".join(StackSummary.extract((frame, frame.f_lineno) for frame in own).format())
    return storable(text)[-MOST_CHARACTERS:]


def _inwards(coroutine: Any) -> Iterator[FrameType]:
    # asyncio's own Task.get_stack() ends at the outermost coroutine.
    while coroutine is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(coroutine, f"{kind}_frame")), None)
        frame = kind and getattr(coroutine, f"{kind}_frame")
        if not frame:
            return
        yield frame
        coroutine = getattr(coroutine, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


def _leads_to_task(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_WAY_TO_TASKS)
