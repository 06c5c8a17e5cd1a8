"""Processes that wait until a task has ended (``result.wait()``): their rows in the table of waiters."""

from __future__ import annotations

from collections.abc import Sequence

from django_pglock.store import statements
from django_pglock.store.sql import array_of_numbers, run


def note_waits(using: str, awaited: Sequence[int], *, instead_of: Sequence[int]) -> dict[int, int]:
    """Write a row for each of these tasks, so that its end is announced on ``DONE_CHANNEL``; delete earlier rows.

    ``instead_of``: the ids of the earlier rows. Returns the ids of the new rows by the ids of the tasks. The caller has
    to look afterwards whether a task has ended already.
    """
    values = (array_of_numbers(instead_of), array_of_numbers(awaited))
    return dict(run(using, statements.NOTE_WAITS, *values))


def ended(using: str, ids: Sequence[int]) -> list[tuple[int, bool]]:
    """Return those of these tasks that have ended, with True, and those that do not exist, with False."""
    is_finished = dict(run(using, statements.LOOK_AT_AWAITED, array_of_numbers(ids)))
    return [(id_, id_ in is_finished) for id_ in ids if is_finished.get(id_, True)]
