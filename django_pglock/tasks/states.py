"""The states of a task and the moves between them, and the dates that its row may have, as data.

The CHECK constraints follow the sets below, tests compare all code that changes a status with this table, and the
picture in the docs is printed from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from types import MappingProxyType

from django.db.models import TextChoices
from django.utils.translation import gettext_lazy as _


class TaskStatus(TextChoices):
    """Where a task is. SCHEDULED and BLOCKED read as READY through ``django.tasks``, CANCELLED as FAILED."""

    SCHEDULED = "SCHEDULED", _("Scheduled")
    BLOCKED = "BLOCKED", _("Blocked")
    READY = "READY", _("Ready")
    RUNNING = "RUNNING", _("Running")
    SUCCESSFUL = "SUCCESSFUL", _("Successful")
    FAILED = "FAILED", _("Failed")
    CANCELLED = "CANCELLED", _("Cancelled")


class UniqueScope(TextChoices):
    """For how long no second task may have the same unique key."""

    WAITING = "WAITING", _("while waiting")
    UNFINISHED = "UNFINISHED", _("while not finished")
    PERIOD = "PERIOD", _("for a period")


#: From each status, the statuses that may follow.
MOVES: Mapping[TaskStatus, frozenset[TaskStatus]] = MappingProxyType(
    {
        # due, or run now | due, with a lock key | claimed along with its group | cancelled before it was due
        TaskStatus.SCHEDULED: frozenset(
            {TaskStatus.READY, TaskStatus.BLOCKED, TaskStatus.RUNNING, TaskStatus.CANCELLED}
        ),
        # admitted to its key, or its after= is done | released, not due yet | claimed along with its group | cancelled
        TaskStatus.BLOCKED: frozenset(
            {TaskStatus.READY, TaskStatus.SCHEDULED, TaskStatus.RUNNING, TaskStatus.CANCELLED}
        ),
        # claimed | cancelled while waiting | replaced by a call that is due later, or waits for another key
        TaskStatus.READY: frozenset(
            {TaskStatus.RUNNING, TaskStatus.CANCELLED, TaskStatus.SCHEDULED, TaskStatus.BLOCKED}
        ),
        # settled: done, failed, cancelled, tried again later | given back or rescued: at once, or when its key is free
        # | suspended until its children have ended
        TaskStatus.RUNNING: frozenset(
            {
                TaskStatus.SUCCESSFUL,
                TaskStatus.FAILED,
                TaskStatus.CANCELLED,
                TaskStatus.SCHEDULED,
                TaskStatus.READY,
                TaskStatus.BLOCKED,
            }
        ),
        TaskStatus.SUCCESSFUL: frozenset(),
        # retried by a person | retried, with a lock key | discarded by a person
        TaskStatus.FAILED: frozenset({TaskStatus.READY, TaskStatus.BLOCKED, TaskStatus.CANCELLED}),
        # retried by a person | retried, with a lock key
        TaskStatus.CANCELLED: frozenset({TaskStatus.READY, TaskStatus.BLOCKED}),
    }
)

#: A task with one of these does not change by itself any more; its row has a ``finished_at``.
FINISHED = frozenset({TaskStatus.SUCCESSFUL, TaskStatus.FAILED, TaskStatus.CANCELLED})
#: A task with one of these is claimed now or later.
WAITING = frozenset({TaskStatus.SCHEDULED, TaskStatus.BLOCKED, TaskStatus.READY})

#: The first and the last date that Python has in each time zone. The constraints of the tables refuse others, because
#: psycopg cannot read them, nor 'infinity'.
READABLE = datetime(1, 1, 2, tzinfo=timezone.utc), datetime(9999, 12, 30, tzinfo=timezone.utc)
