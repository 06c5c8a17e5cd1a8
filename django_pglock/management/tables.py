"""Text tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.utils import timezone


def aligned(head: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the head and the lines with aligned columns."""
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
    for line in (head, *lines):
        yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()


def printable(text: str) -> str:
    """Return the text with "?" in place of each character that could control the terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def ago(since: Any, now: Any = None) -> str:
    """Return the seconds from a moment to ``now`` (default: this host's time) as text, "-" without a moment."""
    return f"{((now or timezone.now()) - since).total_seconds():.0f} s" if since else "-"
