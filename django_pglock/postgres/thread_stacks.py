"""The stacks of all threads of this process, read so that no frame can be freed meanwhile."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

#: From 3.12 on, Python collects garbage only between two bytecodes.
COLLECTS_ANYWHERE = sys.version_info < (3, 12)


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
