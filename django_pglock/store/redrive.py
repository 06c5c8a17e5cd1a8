"""Retries a group of failures, a few tasks at a time, in the order of their ids.

A redrive is itself a task. Its row has its position and the date of the next batch, which are written in the
transaction that retries the tasks. So after a crash no task is left out, none is counted twice and the rate stays the
same, and a worker that has lost the claim on that row retries nothing. A task that fails again has finished after the
redrive was requested, so it is not retried again.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from django.db import transaction
from django.db.models.functions import Extract, Now

from django_pglock.errors import ClaimLost
from django_pglock.store.failures import in_group
from django_pglock.store.retry import retry
from django_pglock.store.statements import rows_of
from django_pglock.store.windows import WINDOW, is_among
from django_pglock.tasks.states import TaskStatus

#: The lowest and the highest rate in tasks a second: one task in a quarter of an hour, and one window a second.
LOWEST_RATE, HIGHEST_RATE = 0.001, float(WINDOW)


class Redriven(NamedTuple):
    """The state of a redrive: how many tasks were retried, and whether all tasks of the group have been read.

    ``wait`` is the number of seconds until the next batch.
    """

    done: int
    is_over: bool
    wait: float


def redrive(
    using: str,
    fingerprint: int,
    *,
    before: datetime,
    limit: int,
    by: int,
    attempt: int,
    seconds: float = 0.0,
) -> Redriven:
    """Retry the next ``limit`` tasks of a group that failed before ``before``, for the redrive that is the task ``by``.

    ``attempt`` is the attempt number of the claim of the redrive. ``seconds`` is the time that a batch takes at least.
    Before it is over, nothing is retried, also by another worker after a crash.

    Tasks that cannot be retried now, because their rows are locked or their unique key is taken, are skipped. Raises
    ``ClaimLost`` if the claim is no longer valid. Then nothing was changed.
    """
    tasks = rows_of("Task", using)
    own = tasks.filter(pk=by, attempts=attempt, status=TaskStatus.RUNNING)
    failed = tasks.filter(finished_at__lte=before)
    with transaction.atomic(using=using):
        [(state, now)] = own.values_list("progress", Extract(Now(), "epoch")) or [(None, 0)]
        state = state or {"done": 0, "total": in_group(failed, fingerprint).count(), "last_id": 0}
        # Never longer than a batch takes, because the server's clock may have stepped back.
        if (wait := min(state.get("next_at", 0) - float(now), seconds)) > 0:
            return Redriven(state["done"], is_over=False, wait=wait)
        ids = window(failed, fingerprint, after=state["last_id"], limit=limit)
        if ids:
            state["done"] += retry(failed.filter(is_among(ids), status=TaskStatus.FAILED))
            state["last_id"] = ids[-1]
            state["next_at"] = float(now) + seconds
        if not own.update(progress=state):
            raise ClaimLost(f"Task {by} is no longer claimed by this attempt, so it retries nothing.")
    return Redriven(state["done"], is_over=len(ids) < limit, wait=seconds)


def window(failed: Any, fingerprint: int, *, after: int, limit: int) -> list[int]:
    """Return the ids of the first ``limit`` tasks of a group above the id ``after``."""
    later = in_group(failed.filter(pk__gt=after), fingerprint).order_by("fingerprint", "pk")
    return list(later.values_list("pk", flat=True)[:limit])
