"""Running tasks whose worker is gone become READY again because a person asks for it."""

from __future__ import annotations

from typing import Any

from django.db.models import Case, Q, Value, When
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now

from django_pglock.store.count import in_status
from django_pglock.store.liveness import alive
from django_pglock.store.move_to_status import DUE_STATUS, move
from django_pglock.store.statements import EXPIRES_AT, rows_of
from django_pglock.tasks.states import TaskStatus

_ASKED = Q(cancel_requested_at__isnull=False)


def stuck(tasks: Any) -> Any:
    """Running tasks whose worker has sent no heartbeat for ``HEARTBEAT_LIMIT``, or has no row."""
    # No join: the planner may look up the worker of each task. Along the index on status and id, so that a list reads
    # as many tasks as it shows: the index on workers has them in another order.
    living = alive(rows_of("Worker", tasks.db)).order_by().values("pk")
    return in_status(tasks, TaskStatus.RUNNING).exclude(worker__in=living)


def reset_stuck(tasks: Any) -> int:
    """Make stuck tasks READY again, or CANCELLED if somebody has asked them to end. Returns how many."""
    changes = {
        "status": Case(When(_ASKED, then=Value(TaskStatus.CANCELLED.value)), default=DUE_STATUS),
        "finished_at": Case(When(_ASKED, then=Now())),
        "expires_at": Case(When(_ASKED, then=RawSQL(EXPIRES_AT, ()))),  # noqa: S611
        "worker": None,
    }
    return len(move(stuck(tasks), TaskStatus.READY, changes, among={TaskStatus.RUNNING}))
