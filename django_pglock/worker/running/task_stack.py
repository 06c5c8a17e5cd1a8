"""The stack of a running task, as text: files, lines, functions and source lines, but no values of variables.

Another thread reads the frames. It needs the GIL only for a moment, so it can read the stack of a function that
computes in Python. If C code keeps the GIL, the stack is read when that code returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import dropwhile, islice
from traceback import StackSummary
from types import FrameType
from typing import Any

from django_pglock.error_reading import storable

#: The number of innermost frames that are read of a stack, and of last characters of the text that are kept.
MOST_FRAMES, MOST_CHARACTERS = 200, 30_000
#: The modules of the outermost frames, which are the same for each task and are left out.
_WAY_TO_TASKS = ("threading", "concurrent.futures.thread", "asyncio.", "asgiref.", "django_pglock.worker.")


def stack_text(innermost: FrameType | None) -> str:
    """Return the stack of a thread as text, the most recent call last."""
    return _text(_outwards(innermost))


def coroutine_text(coroutine: Any) -> str:
    """Return the stack of a suspended coroutine as text: the coroutine, the one that it awaits, and so on."""
    return _text(reversed(list(islice(_inwards(coroutine), MOST_FRAMES))))


def _text(frames: Iterable[FrameType]) -> str:
    """Return frames as text. The innermost frame comes first."""
    found = list(islice(frames, MOST_FRAMES))[::-1]
    own = list(dropwhile(_leads_to_task, found)) or found
    text = "".join(StackSummary.extract((frame, frame.f_lineno) for frame in own).format())
    return storable(text)[-MOST_CHARACTERS:]


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


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
