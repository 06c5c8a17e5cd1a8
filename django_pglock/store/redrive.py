"""A group of failures is retried a few tasks at a time, in the order of their ids.

How far a redrive has come is in the row of the task that does it, written in the transaction that retries the tasks. So
a crash neither forgets a task nor counts one twice, and a worker that has lost the claim on that row retries nothing. A
task that fails again has finished after the redrive was asked for, so it is not retried again.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from django.db import transaction

from django_pglock.errors import ClaimLost
from django_pglock.store.failures import FailureGroupId, in_group, marked, unmarked
from django_pglock.store.move import WINDOW, is_among
from django_pglock.store.retry import retry
from django_pglock.store.sql import rows_of
from django_pglock.tasks.states import TaskStatus

#: The lowest and the highest rate in tasks a second: one in a quarter of an hour, and one window.
LOWEST_RATE, HIGHEST_RATE = 0.001, float(WINDOW)


class Redriven(NamedTuple):
    """How far a redrive has come: how many tasks were retried, and whether all have been read."""

    done: int
    is_over: bool


def redrive(using: str, group: FailureGroupId, *, before: datetime, limit: int, by: int, attempt: int) -> Redriven:
    """Retry the next ``limit`` tasks of a group that had failed ``before``, on behalf of the task ``by``.

    ``attempt`` is the number of the claim by which that task runs.

    Tasks that cannot be retried now, because their rows are locked or their unique key is taken, are passed over.
    Raises ``ClaimLost`` if that claim is no longer valid; then nothing has happened.
    """
    tasks = rows_of("Task", using)
    own = tasks.filter(pk=by, attempts=attempt, status=TaskStatus.RUNNING)
    failed = tasks.filter(finished_at__lte=before)
    with transaction.atomic(using=using):
        state: Any = next(iter(own.values_list("progress", flat=True)), None) or {
            "done": 0, "total": in_group(failed, group).count(), "last_id": 0,
        }  # fmt: skip
        ids = window(failed, group, after=state["last_id"], limit=limit)
        if ids:
            state["done"] += retry(failed.filter(is_among(ids), status=TaskStatus.FAILED))
            state["last_id"] = ids[-1]
        if not own.update(progress=state):
            raise ClaimLost(f"Task {by} is no longer claimed by this attempt, so it retries nothing.")
    return Redriven(state["done"], len(ids) < limit)


def window(failed: Any, group: FailureGroupId, *, after: int, limit: int) -> list[int]:
    """Return the first ids above ``after`` of the tasks of a group, ``limit`` at most."""
    later = failed.filter(pk__gt=after)
    known = marked(later, group.fingerprint).order_by("fingerprint", "pk")
    ids = list(known.values_list("pk", flat=True)[:limit])
    if group.has_unmarked:
        others = unmarked(later, group).order_by("fingerprint", "pk")
        ids += others.values_list("pk", flat=True)[:limit]
    return sorted(ids)[:limit]
