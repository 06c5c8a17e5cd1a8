"""Changes many rows in windows of some thousand, so that other transactions wait for a row lock only briefly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from django.db.models import BooleanField, F, Func, Value

from django_pglock.postgres.connections import connection_for, in_transaction
from django_pglock.store.statements import array_of_numbers

#: The number of rows that one statement changes or reads.
WINDOW = 5000

Progress = Callable[[int, int], None]


def by_windows(tasks: Any, chosen: Any, verb: Callable[[Any], int], progress: Progress | None) -> int:
    """Apply ``verb`` to the ``chosen`` of these tasks in windows of some thousand, so that row locks are short.

    ``progress`` is called after each window, with the number of tasks so far and the last id. Inside the caller's
    transaction ``verb`` gets all ``tasks`` at once, because their rows stay locked until its end in any case.
    """
    if in_transaction(connection_for(tasks.db)):
        return verb(tasks)
    count, ids = 0, list(chosen.values_list("pk", flat=True))
    for start in range(0, len(ids), WINDOW):
        window = ids[start : start + WINDOW]
        count += verb(tasks.filter(is_among(window)))
        if progress:
            progress(count, window[-1])
    return count


def is_among(ids: Iterable[int]) -> Func:
    """Return a condition: a task has one of these ids. As one array, because a parameter for each takes far longer."""
    template = "%(expressions)s::bigint[])"
    array = Value(array_of_numbers(ids))
    return Func(F("pk"), array, template=template, arg_joiner=" = ANY (", output_field=BooleanField())
