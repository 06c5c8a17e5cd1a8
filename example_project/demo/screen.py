"""The output while the demo runs: a progress bar on a terminal, or a line every two seconds."""

from __future__ import annotations

import os
import shutil
import time
from typing import TextIO

BAR = 30


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 task", "2,000 tasks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def times(number: int) -> str:
    """Return how often: "once", "2 times"."""
    return "once" if number == 1 else f"{number:,} times"


class Screen:
    """Writes sentences and one moving line."""

    def __init__(self, stream: TextIO, *, quiet: bool = False, colour: bool = True) -> None:
        self.stream = stream
        self.quiet = quiet
        self.is_terminal = stream.isatty()
        self.has_colour = colour and self.is_terminal and not os.environ.get("NO_COLOR")
        self._drawn_at = 0.0
        self._has_line = False

    def say(self, text: str) -> None:
        """Write a sentence on a line of its own."""
        if self.quiet:
            return
        self._end_line()
        self.stream.write(f"{text}\n")
        self.stream.flush()

    def progress(self, done: int, total: int, note: str, *, is_last: bool = False) -> None:
        """Move the bar. Where there is no terminal, write a line every two seconds."""
        if self.quiet:
            return
        now = time.monotonic()
        if not self.is_terminal and not is_last and now - self._drawn_at < 2:
            return
        self._drawn_at = now
        filled = BAR * done // max(total, 1)
        bar = self.paint("█" * filled, "32") + "░" * (BAR - filled)
        line = f"  {bar} {done:>5,}/{total:,}  {note}"
        if self.is_terminal:
            width = shutil.get_terminal_size().columns + (9 if self.has_colour else 0)
            self.stream.write(f"\r\x1b[2K{line[:width]}")
            self._has_line = True
        else:
            self.stream.write(f"{line}\n")
        self.stream.flush()

    def paint(self, text: str, code: str) -> str:
        """Return text in a colour, where there are colours."""
        return f"\x1b[{code}m{text}\x1b[0m" if self.has_colour else text

    def mark(self, holds: bool) -> str:
        """Return a mark for a claim that holds or does not."""
        return self.paint("✓", "32") if holds else self.paint("✗", "31;1")

    def _end_line(self) -> None:
        if self._has_line:
            self.stream.write("\n")
            self._has_line = False
