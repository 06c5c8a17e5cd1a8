"""Makes scheduled tasks READY when they are due, or BLOCKED if they have a lock key."""

from __future__ import annotations

from typing import Any

from django.db.models import F
from django.db.models.functions import Now

from django_pglock.store.admit import admit_on_commit
from django_pglock.store.marking import first_free, mark
from django_pglock.store.move_to_status import DUE_STATUS
from django_pglock.store.statements import rows_of, run
from django_pglock.store.wake import wake
from django_pglock.tasks.states import TaskStatus

# Seconds until the next task or the next token of a rate is due. Zero or less: one is due. NULL: there is none.
NEXT_DUE = """
SELECT EXTRACT(EPOCH FROM LEAST(
    (SELECT run_after FROM {task} WHERE status = 'SCHEDULED' ORDER BY run_after LIMIT 1),
    (SELECT opens_at FROM {rate_limit} WHERE opens_at IS NOT NULL ORDER BY opens_at LIMIT 1)
) - clock_timestamp())::float8
"""


def due(tasks: Any) -> Any:
    """Return the scheduled tasks whose time has come, the longest overdue first."""
    return tasks.filter(status=TaskStatus.SCHEDULED, run_after__lte=Now()).order_by("run_after", "id")


def promote(using: str, *, limit: int = 1000) -> int:
    """Make up to ``limit`` due tasks READY or BLOCKED. Returns how many."""
    selection = first_free(due(rows_of("Task", using)), limit, no_key=True)
    promoted = mark(selection, {"status": DUE_STATUS}, "queue", "lock_key")
    wake(using, (queue for queue, key in promoted if key is None))
    admit_on_commit(using, {key for _, key in promoted})
    return len(promoted)


def restart_delays(using: str, *, limit: int = 10_000) -> int:
    """Restart the delays of retries and snoozes that were written before the server's clock was put back.

    Their last attempt is in the future, so without this they would wait for the whole step. Returns how many.
    """
    ahead = rows_of("Task", using).filter(
        status=TaskStatus.SCHEDULED, last_attempted_at__gt=Now(), run_after__gt=F("last_attempted_at")
    )
    delay = F("run_after") - F("last_attempted_at")
    changes = {"run_after": Now() + delay, "last_attempted_at": Now()}
    return len(mark(first_free(ahead.order_by("run_after", "id"), limit, no_key=True), changes, "id"))


def next_due_in(using: str) -> float | None:
    """Return the seconds until the next scheduled task is due. Zero or less: one is due. None: there is none."""
    [(seconds,)] = run(using, NEXT_DUE)
    return None if seconds is None else float(seconds)
