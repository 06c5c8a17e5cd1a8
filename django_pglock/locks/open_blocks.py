"""Finds the handle of the with block that ends. One lock object may have open blocks in many threads and tasks."""

from __future__ import annotations

import sys
from typing import Any

from django_pglock.errors import LockError


def caller() -> int:
    """Return the frame of the with statement that calls our method; ``NO_FRAME`` for ``ExitStack`` and the like."""
    frame = sys._getframe(2)  # noqa: SLF001 - inspect.currentframe() is the same, and ten times slower
    return NO_FRAME if frame.f_globals.get("__name__") == "contextlib" else id(frame)


#: The value for ``ExitStack`` and the like, whose frame no longer exists when the block ends.
NO_FRAME = 0


class OpenBlocks:
    """The handles of the with statements that are open on one object.

    A block belongs to the frame of its with statement. The frame is the same at the end of the block, also if another
    thread or task closes a generator. If ``ExitStack`` enters and leaves the block, the block that ends is the latest
    one of the thread or task.
    """

    def __init__(self) -> None:
        self._blocks: list[tuple[int, Any, Any]] = []

    def add(self, frame: int, who: Any, handle: Any) -> None:
        """Note that a block begins."""
        if self._blocks:
            # Remove blocks whose end was interrupted after the release.
            for each in [each for each in self._blocks if each[2].is_done]:
                self._remove(each)
        self._blocks.append((frame, who, handle))

    def discard(self, handle: Any) -> None:
        """Remove a block that has ended, or that could not begin."""
        for each in [each for each in self._blocks if each[2] is handle]:
            self._remove(each)

    def _remove(self, block: tuple[int, Any, Any]) -> None:
        # Several threads may run this at the same time. All changes are single, atomic operations.
        try:  # noqa: SIM105 - as in session_locks.py
            self._blocks.remove(block)
        except ValueError:
            pass

    def find(self, frame: int, who: Any) -> tuple[Any, bool]:
        """Return the handle of the block that ends, and whether the block began in another thread or task."""
        blocks = self._blocks[::-1]
        if blocks and frame != NO_FRAME and blocks[0][:2] == (frame, who):
            return blocks[0][2], False
        of_frame = [each for each in blocks if each[0] == frame] if frame != NO_FRAME else []
        without_frame = [each for each in blocks if each[0] == NO_FRAME]
        found = (
            next((each for each in of_frame if each[1] == who), None)
            or next(iter(of_frame), None)
            or next((each for each in without_frame if each[1] == who), None)
            or (without_frame[0] if len(without_frame) == 1 else None)
            or next((each for each in blocks if each[1] == who), None)
            or (blocks[0] if len(blocks) == 1 else None)
        )
        if found is None:
            raise LockError("This with block and others end in another thread or asyncio task than they began in.")
        return found[2], found[1] != who
