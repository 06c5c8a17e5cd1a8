"""The valid names of queues, and the patterns that match them."""

from __future__ import annotations

from collections.abc import Iterable

#: The column's width.
LONGEST_QUEUE = 128
#: The queue of the tasks of this package. Each worker serves it, whatever its own queues and those of ``TASKS`` are.
OWN_QUEUE = "django_pglock"


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


def covers(pattern: str, name: str) -> bool:
    """Return whether a pattern, a name or a prefix with ``*`` at its end, covers a name or a longer prefix."""
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


def is_served(name: str, asked: Iterable[str]) -> bool:
    """Return whether a worker serves a queue. ``asked``: ``queues`` of its row, the queues on its command line."""
    if name == OWN_QUEUE:
        return True
    names = [each for each in asked if not each.startswith("--exclude ")]
    excluded = [each.removeprefix("--exclude ") for each in asked if each.startswith("--exclude ")]
    wanted = [each.rpartition("=")[0] if "=" in each else each for each in names] or ["*"]
    return any(covers(each, name) for each in wanted) and not any(covers(each, name) for each in excluded)
