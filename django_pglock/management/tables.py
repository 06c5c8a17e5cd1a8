"""Text tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from django.utils import timezone
from django.utils.timesince import timesince


def aligned(head: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the head and the lines with aligned columns."""
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
    for line in (head, *lines):
        yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()


def printable(text: str) -> str:
    """Return the text with "?" in place of each character that could control the terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def ago(since: Any, now: Any = None) -> str:
    """Return the time from a moment to ``now`` (default: this host's time) as text, "-" without a moment."""
    return duration_text(((now or timezone.now()) - since).total_seconds()) if since else "-"


def duration_text(seconds: float) -> str:
    """Return a length of time: in seconds below two minutes, from then on as Django's ``timesince``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    now = timezone.now()
    # In a terminal a no-break space may not be a space.
    return timesince(now - timedelta(seconds=seconds), now).replace("\xa0", " ")
