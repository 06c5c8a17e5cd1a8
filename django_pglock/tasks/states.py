"""The states of a task and the moves between them, as data.

Everything that changes a status reads this table: the guarded UPDATEs ask ``sources_of``, the database's CHECK
constraints mirror the three families below, a test walks all pairs, and the picture in the docs is printed from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from django.db.models import TextChoices
from django.utils.translation import gettext_lazy as _


class TaskStatus(TextChoices):
    """Where a task is. SCHEDULED reads as READY through ``django.tasks``, CANCELLED as FAILED."""

    SCHEDULED = "SCHEDULED", _("Scheduled")
    READY = "READY", _("Ready")
    RUNNING = "RUNNING", _("Running")
    SUCCESSFUL = "SUCCESSFUL", _("Successful")
    FAILED = "FAILED", _("Failed")
    CANCELLED = "CANCELLED", _("Cancelled")


#: From each status, the statuses that may follow.
MOVES: Mapping[TaskStatus, frozenset[TaskStatus]] = MappingProxyType(
    {
        # due, or run now | cancelled before it was due
        TaskStatus.SCHEDULED: frozenset({TaskStatus.READY, TaskStatus.CANCELLED}),
        # claimed | cancelled while waiting
        TaskStatus.READY: frozenset({TaskStatus.RUNNING, TaskStatus.CANCELLED}),
        # settled: done, given up, to be tried later | given back or rescued
        TaskStatus.RUNNING: frozenset(
            {
                TaskStatus.SUCCESSFUL,
                TaskStatus.FAILED,
                TaskStatus.CANCELLED,
                TaskStatus.SCHEDULED,
                TaskStatus.READY,
            }
        ),
        TaskStatus.SUCCESSFUL: frozenset(),
        # retried by hand
        TaskStatus.FAILED: frozenset({TaskStatus.READY}),
        TaskStatus.CANCELLED: frozenset({TaskStatus.READY}),
    }
)

#: Nothing more will happen by itself; these rows have a ``finished_at``.
FINISHED = frozenset({TaskStatus.SUCCESSFUL, TaskStatus.FAILED, TaskStatus.CANCELLED})
#: Waiting to be claimed, now or later.
WAITING = frozenset({TaskStatus.SCHEDULED, TaskStatus.READY})


def sources_of(target: TaskStatus) -> list[str]:
    """Return the statuses from which a task may move to ``target``, as the database writes them, in order."""
    return sorted(source.value for source, targets in MOVES.items() if target in targets)
