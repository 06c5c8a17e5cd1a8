"""Conversion of command line arguments."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from django.core.management.base import CommandError
from django.utils.translation import gettext as _

T = TypeVar("T")


class WrongArguments(CommandError):
    """Arguments that the parser accepts and the command does not. The exit code is 2, as for errors of the parser."""

    def __init__(self, text: str) -> None:
        super().__init__(text, returncode=2)


def read_by(read: Callable[[str], T]) -> Callable[[str], T]:
    """Return a ``type`` for argparse that shows the message of a ``ValueError``. argparse itself drops the message."""

    def parse(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def positive(text: str) -> int:
    """Return a number of rows. Raises ``ArgumentTypeError`` for a text that cannot be one."""
    # Python reads neither all digits that Unicode has, nor thousands of them.
    number = int(text) if text.isdecimal() and len(text) < 10 else 0
    if not 1 <= number <= 1_000_000:
        raise argparse.ArgumentTypeError(_("%r is not a number from 1 to 1,000,000") % text)
    return number
