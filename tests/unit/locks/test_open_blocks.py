"""Which handle belongs to the with block that ends. Frames and threads are numbers here."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from django_pglock.errors import LockError
from django_pglock.locks.open_blocks import NO_FRAME, OpenBlocks, caller

FRAME, OTHER_FRAME = 1, 2


class Block:
    def __enter__(self):
        return caller()

    def __exit__(self, *error):
        pass


def opened(*blocks, is_done=False):
    """Return open blocks, each given by its frame and its thread. Their handles have the numbers from 0 on."""
    found = OpenBlocks()
    for number, (frame, who) in enumerate(blocks):
        found.add(frame, who, SimpleNamespace(number=number, is_done=is_done))
    return found


@pytest.mark.parametrize(
    ("blocks", "ends", "number", "is_elsewhere"),
    [
        ([(FRAME, "me")], (FRAME, "me"), 0, False),
        ([(FRAME, "me"), (FRAME, "me")], (FRAME, "me"), 1, False),
        ([(FRAME, "me"), (OTHER_FRAME, "other")], (FRAME, "me"), 0, False),
        # a generator that another thread closes
        ([(FRAME, "me"), (OTHER_FRAME, "other")], (FRAME, "other"), 0, True),
        # ExitStack: the latest one of the thread
        ([(NO_FRAME, "me"), (NO_FRAME, "other"), (FRAME, "me")], (NO_FRAME, "me"), 0, False),
        # ExitStack that another thread closes, beside a block of a with statement
        ([(NO_FRAME, "me"), (FRAME, "other")], (NO_FRAME, "other"), 0, True),
        ([(FRAME, "me")], (NO_FRAME, "other"), 0, True),
    ],
)
def test_the_block_that_ends_is_found(blocks, ends, number, is_elsewhere):
    handle, elsewhere = opened(*blocks).find(*ends)
    assert (handle.number, elsewhere) == (number, is_elsewhere)


def test_a_block_that_cannot_be_told_from_others_is_an_error():
    with pytest.raises(LockError, match="another thread or asyncio task"):
        opened((NO_FRAME, "me"), (NO_FRAME, "you")).find(NO_FRAME, "a third")


def test_the_caller_is_the_frame_of_the_with_statement():
    with Block() as frame, Block() as the_same:
        assert frame == the_same != NO_FRAME
    with ExitStack() as stack:
        assert stack.enter_context(Block()) == NO_FRAME
