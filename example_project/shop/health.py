"""Whether workers are alive, and how long tasks wait."""

from __future__ import annotations

from typing import Any

from django.db import DatabaseError, connection
from django.db.models import Min
from django.db.models.functions import Coalesce, Greatest, Now

from django_pglock.models import Task, Worker

#: Seconds. A task that is due for longer shows that something is wrong.
LONGEST_WAIT = 300


def health() -> dict[str, Any]:
    """Return what is known about database, workers and waiting tasks, and whether all is well."""
    try:
        workers = Worker.objects.alive().count()
        waits = _longest_wait()
    except DatabaseError as error:
        connection.close()
        return {"healthy": False, "database": str(error).strip().splitlines()[0]}
    return {
        "healthy": workers > 0 and waits < LONGEST_WAIT,
        "database": "ok",
        "workers": workers,
        "oldest_due_seconds": round(waits, 1),
    }


def _longest_wait() -> float:
    # A task that is scheduled for tonight, or for a retry in an hour, has not waited since it was enqueued.
    due = Greatest("enqueued_at", Coalesce("run_after", "enqueued_at"))
    waiting = Task.objects.filter(status__in=["READY", "SCHEDULED"]).annotate(due=due).filter(due__lte=Now())
    age = waiting.aggregate(age=Now() - Min("due"))["age"]
    return age.total_seconds() if age else 0.0
