"""The right to run one attempt of one task."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

from django.conf import settings
from django.utils.timezone import make_naive

#: The attributes of log records about a task.
LOG_FIELDS = ("task_id", "task_path", "queue", "attempt", "worker")


#: The claim whose function runs in this thread or coroutine.
running_claim: ContextVar[Claim | None] = ContextVar("django_pglock_running_claim", default=None)


def date_of(seconds: float | None) -> datetime | None:
    """Return seconds since the epoch as a date, to the microsecond; without ``USE_TZ`` it is naive."""
    if seconds is None:
        return None
    date = datetime.fromtimestamp(seconds, tz=timezone.utc)
    return date if settings.USE_TZ else make_naive(date)


@dataclass(slots=True, eq=False)
class Claim:
    """One claimed attempt: the task's row as the claiming statement returned it.

    ``id`` and ``attempt`` together are the fence: each later write checks that the row still has both. ``args``,
    ``kwargs`` and ``meta`` are JSON texts, and dates are texts of seconds since the epoch. Code that needs a value
    decodes it.
    """

    id: int
    attempt: int
    worker: UUID
    backend: str
    queue: str
    priority: int
    task_path: str
    args: str
    kwargs: str
    meta: str
    retries: int
    max_retries: int
    rescues: int
    run_after: str | None
    enqueued_at: str
    #: None: this is the first claim of the task.
    started_at: str | None
    last_attempted_at: str
    lock_key: str | None = None
    #: The number of earlier claims that do not count as attempts, because they were given back or snoozed.
    uncounted: int = 0
    #: Whether a cancel of the task was requested.
    is_cancelled: bool = False
    #: The last progress that the function has reported, and the progress in the table, as JSON texts.
    progress: str | None = None
    written_progress: str | None = None
    #: The log records of the attempt, if its function has ``capture_logs``; empty if there are none.
    log: str | None = None

    def date(self, name: str) -> datetime | None:
        """Return one of the dates as a value."""
        text: str | None = getattr(self, name)
        if text is None and name == "started_at":
            text = self.last_attempted_at
        return date_of(None if text is None else float(text))

    @property
    def due_at(self) -> float:
        """When the task was due, in seconds since the epoch."""
        enqueued_at = float(self.enqueued_at)
        return enqueued_at if self.run_after is None else max(enqueued_at, float(self.run_after))

    @property
    def waited(self) -> float:
        """For how many seconds the task was due until this claim."""
        return max(0.0, float(self.last_attempted_at) - self.due_at)

    @property
    def is_first(self) -> bool:
        """Whether this is the first attempt, so that there are no failed attempts to read."""
        return self.attempt - self.uncounted == 1

    @property
    def number(self) -> int:
        """The number of the attempt for people. ``attempt`` is the number of the claim."""
        return self.attempt - self.uncounted

    def __repr__(self) -> str:
        return f"<Claim of task {self.id} ({self.task_path}) attempt {self.number}>"

    def __str__(self) -> str:
        # The largest number of attempts, as far as it is known now. Each rescue or interruption adds one.
        most = self.number + self.max_retries - self.retries
        return f"Task {self.id} ({self.task_path}) attempt {self.number} of {most}"

    def log_fields(self) -> dict[str, Any]:
        """Return the fields of the task for log records, by the names in ``LOG_FIELDS``."""
        return {
            "task_id": self.id,
            "task_path": self.task_path,
            "queue": self.queue,
            "attempt": self.number,
            "worker": str(self.worker),
        }
