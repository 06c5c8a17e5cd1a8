"""The stacks of all threads of this process, read so that no frame can vanish meanwhile."""

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
    """Return the innermost frame of each thread, by the number of the thread. Read the frames in this block.

    Before Python 3.12, to make a frame object may start a garbage collection. A finalizer that it calls may let other
    threads run, and the frame for which the object is made may end before the object refers to it: then Python reads
    freed memory. So nothing is collected in this block.
    """
    is_paused = COLLECTS_ANYWHERE and gc.isenabled()
    if is_paused:
        gc.disable()
    try:
        yield sys._current_frames()  # noqa: SLF001 - there is no other name for it
    finally:
        if is_paused:
            gc.enable()
