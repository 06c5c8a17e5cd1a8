"""Is somebody working, and how long does work wait?"""

from __future__ import annotations

from typing import Any

from django.db import DatabaseError, connection
from django.db.models import Min
from django.db.models.functions import Now

from django_pglock.models import Task, Worker

#: Seconds that a ready task may wait before something is wrong.
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
        "oldest_ready_seconds": round(waits, 1),
    }


def _longest_wait() -> float:
    age = Task.objects.filter(status="READY").aggregate(age=Now() - Min("enqueued_at"))["age"]
    return age.total_seconds() if age else 0.0
