"""Makes running tasks of dead workers READY again at the request of a person."""

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

_CANCEL_REQUESTED = Q(cancel_requested_at__isnull=False)


def stuck(tasks: Any) -> Any:
    """Return the running tasks whose worker has sent no heartbeat for ``HEARTBEAT_LIMIT``, or has no row."""
    # No join, because the planner might look up the worker of each task. The tasks are read in the order of the index
    # on status and id, so that a list reads only as many tasks as it shows. The index on workers has another order.
    living = alive(rows_of("Worker", tasks.db)).order_by().values("pk")
    # As a query, which names no database: a verb uses another one if a router sends reads to a replica.
    return in_status(tasks, TaskStatus.RUNNING).exclude(worker__in=living.query)


def reset_stuck(tasks: Any) -> int:
    """Make stuck tasks READY again, or CANCELLED if their cancel was requested. Returns how many."""
    changes = {
        "status": Case(When(_CANCEL_REQUESTED, then=Value(TaskStatus.CANCELLED.value)), default=DUE_STATUS),
        "finished_at": Case(When(_CANCEL_REQUESTED, then=Now())),
        "expires_at": Case(When(_CANCEL_REQUESTED, then=RawSQL(EXPIRES_AT, ()))),  # noqa: S611
        "worker": None,
    }
    return len(move(stuck(tasks), TaskStatus.READY, changes))
