"""Makes running tasks of dead workers READY again at the request of a person."""

from __future__ import annotations

from typing import Any

from django.db.models import Case, OuterRef, Q, Subquery, Value, When
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now

from django_pglock.store.count import in_status
from django_pglock.store.liveness import is_alive, works
from django_pglock.store.move_to_status import DUE_STATUS, move
from django_pglock.store.statements import EXPIRES_AT, rows_of
from django_pglock.tasks.states import TaskStatus

_CANCEL_REQUESTED = Q(cancel_requested_at__isnull=False)


def stuck(tasks: Any) -> Any:
    """Return the running tasks of dead workers: those without a row, and those without heartbeat for the hard limit.

    A worker whose session works may only be unable to write its heartbeat.
    """
    # No join, because the planner might look up the worker of each task. The tasks are read in the order of the index
    # on status and id, so that a list reads only as many tasks as it shows. The index on workers has another order.
    living = rows_of("Worker", tasks.db).filter(is_alive() | works()).order_by().values("pk")
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
    return len(move(_seen(stuck(tasks)), TaskStatus.READY, changes))


def _seen(tasks: Any) -> Any:
    """Return those of the running tasks whose claim is the one that the statement has seen, as in ``RESCUE``.

    Before the statement locks a row, a worker may rescue and claim the task. It may be so new that the list of living
    workers does not contain it. PostgreSQL then checks the new version of the row, but a subquery reads the old one.
    """
    before = rows_of("Task", tasks.db).filter(pk=OuterRef("pk")).values("attempts")
    return tasks.filter(attempts=Subquery(before[:1]))
