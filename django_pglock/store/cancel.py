"""Cancels tasks: waiting tasks at once, running tasks by a request that their worker passes on."""

from __future__ import annotations

import time
from typing import Any

from django.db.models import Case, F, Q, Value, When
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now

from django_pglock.store.move_to_status import move
from django_pglock.store.statements import EXPIRES_AT
from django_pglock.store.wake import REQUEST_CHANNEL, notify_after_commit
from django_pglock.store.windows import Progress, by_windows
from django_pglock.tasks.states import WAITING, TaskStatus

#: How often a cancel is tried again if rows are locked, and the seconds before each of these calls.
REPEATS, BETWEEN_REPEATS = 3, 0.01

# Notifies all workers of requests about these tasks (requests_to_worker.py).
NOTIFY_REQUEST = "SELECT pg_notify(%s, id::text) FROM unnest(%s::bigint[]) AS id"

_RUNNING = Q(status=TaskStatus.RUNNING)
_CANCEL_NOT_REQUESTED = _RUNNING & Q(cancel_requested_at__isnull=True)
_UNFINISHED = (*sorted(WAITING), TaskStatus.RUNNING.value)


def cancel(tasks: Any, *, progress: Progress | None = None) -> int:
    """Cancel the waiting tasks, and request a cancel of the running ones. Returns how many tasks that were.

    The newest tasks are cancelled first. Otherwise the cancel of an older task could admit a newer one to its lock key,
    or release it from its ``after=``, before the newer one is cancelled.
    """
    return by_windows(tasks, cancellable(tasks).order_by("-pk"), _cancel, progress)


def cancellable(tasks: Any) -> Any:
    """Return the tasks that ``cancel`` would change now: without those whose cancel was requested before."""
    # Failed tasks may become CANCELLED, too, but only by a discard.
    return tasks.filter(_CANCEL_NOT_REQUESTED | ~_RUNNING, status__in=_UNFINISHED)


def _cancel(tasks: Any) -> int:
    count = _cancel_free(tasks)
    for _ in range(REPEATS):
        # A row is locked for a moment when it is claimed, and when its progress is written.
        if not cancellable(tasks).exists():
            break
        time.sleep(BETWEEN_REPEATS)
        count += _cancel_free(tasks)
    return count


def _cancel_free(tasks: Any) -> int:
    changes = {
        "status": Case(When(_RUNNING, then=F("status")), default=Value(TaskStatus.CANCELLED.value)),
        "finished_at": Case(When(_RUNNING, then=None), default=Now()),
        "expires_at": Case(When(_RUNNING, then=None), default=RawSQL(EXPIRES_AT, ())),  # noqa: S611
        "cancel_requested_at": Case(When(_RUNNING, then=Now())),
    }
    moved = move(cancellable(tasks), TaskStatus.CANCELLED, changes, among=_UNFINISHED)
    asked = [id_ for id_, _, status, _ in moved if status == TaskStatus.RUNNING]
    if asked:
        notify_after_commit(tasks.db, NOTIFY_REQUEST, REQUEST_CHANNEL, asked)
    return len(moved)
