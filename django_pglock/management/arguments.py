"""Conversion of command line arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def read_by(read: Callable[[str], T]) -> Callable[[str], T]:
    """Return a ``type`` for argparse that shows the message of a ``ValueError``. argparse itself drops the message."""

    def parse(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse
