"""How arguments of commands are read."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def read_by(read: Callable[[str], T]) -> Callable[[str], T]:
    """Return a ``type`` for argparse that says what ``read`` says: of a ``ValueError`` it would show nothing."""

    def parse(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse
