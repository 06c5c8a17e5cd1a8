"""Which names a queue can have."""

from __future__ import annotations

#: The column's width.
LONGEST_QUEUE = 128


def check_queue_name(name: str) -> None:
    """Raise ``ValueError`` for a text that cannot be the name of a queue."""
    if not 1 <= len(name) <= LONGEST_QUEUE:
        raise ValueError(f"A queue's name must have 1 to {LONGEST_QUEUE} characters, not {len(name):,}: {name[:40]!r}.")
    check_text(name, "A queue's name")


def check_text(text: str, what: str) -> None:
    """Raise ``ValueError`` for a text that PostgreSQL does not store; ``what`` names it in the message."""
    if "\x00" in text or any("\ud800" <= each <= "\udfff" for each in text):
        raise ValueError(
            f"{what} contains a NUL character or a lone surrogate, which PostgreSQL cannot store: {text[:40]!r}."
        )
