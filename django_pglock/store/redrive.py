"""Retries a group of failures, a few tasks at a time, in the order of their ids.

A redrive is itself a task. Its row has its position, which is written in the transaction that retries the tasks. So
after a crash no task is left out and none is counted twice, and a worker that has lost the claim on that row retries
nothing. A task that fails again has finished after the redrive was requested, so it is not retried again.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from django.db import transaction

from django_pglock.errors import ClaimLost
from django_pglock.store.failures import FailureGroupId, in_group, with_fingerprint, without_fingerprint
from django_pglock.store.retry import retry
from django_pglock.store.statements import rows_of
from django_pglock.store.windows import WINDOW, is_among
from django_pglock.tasks.states import TaskStatus

#: The lowest and the highest rate in tasks a second: one task in a quarter of an hour, and one window a second.
LOWEST_RATE, HIGHEST_RATE = 0.001, float(WINDOW)


class Redriven(NamedTuple):
    """The state of a redrive: how many tasks were retried, and whether all tasks of the group have been read."""

    done: int
    is_over: bool


def redrive(using: str, group: FailureGroupId, *, before: datetime, limit: int, by: int, attempt: int) -> Redriven:
    """Retry the next ``limit`` tasks of a group that failed before ``before``, for the redrive that is the task ``by``.

    ``attempt`` is the attempt number of the claim of the redrive.

    Tasks that cannot be retried now, because their rows are locked or their unique key is taken, are skipped. Raises
    ``ClaimLost`` if the claim is no longer valid. Then nothing was changed.
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
    """Return the ids of the first ``limit`` tasks of a group above the id ``after``."""
    later = failed.filter(pk__gt=after)
    known = with_fingerprint(later, group.fingerprint).order_by("fingerprint", "pk")
    ids = list(known.values_list("pk", flat=True)[:limit])
    if group.may_lack_fingerprint:
        others = without_fingerprint(later, group).order_by("fingerprint", "pk")
        ids += others.values_list("pk", flat=True)[:limit]
    return sorted(ids)[:limit]
