"""The right to run one attempt of one task."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

from django.conf import settings
from django.utils.timezone import make_naive


def date_of(seconds: float | None) -> datetime | None:
    """Return what the database gave as seconds since the epoch, to the microsecond, and naive if ``USE_TZ`` says so."""
    if seconds is None:
        return None
    date = datetime.fromtimestamp(seconds, tz=timezone.utc)
    return date if settings.USE_TZ else make_naive(date)


@dataclass(slots=True, eq=False)
class Claim:
    """One claimed attempt: the task's row as the claiming statement returned it.

    ``id`` and ``attempt`` together are the fence: every later write asks whether the row still carries both.
    ``args``, ``kwargs`` and ``meta`` are JSON text, dates are seconds since the epoch; who needs a value decodes it.
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
    run_after: float | None
    enqueued_at: float
    started_at: float
    last_attempted_at: float
    lock_key: str | None = None
    #: Claims before this one that were no attempts: given back, or snoozed.
    uncounted: int = 0
    #: Somebody has asked for its end.
    is_cancelled: bool = False
    #: What the function has told last of its progress, and what of that the table knows: JSON texts.
    progress: str | None = None
    noted_progress: str | None = None

    def date(self, name: str) -> datetime | None:
        """Return one of the dates as a value."""
        return date_of(getattr(self, name))

    @property
    def is_first(self) -> bool:
        """No attempt was before this one, so nobody needs to look for what came of it."""
        return self.number == 1

    @property
    def number(self) -> int:
        """Which attempt this is, as people count: ``attempt`` is the number of the claim."""
        return self.attempt - self.uncounted

    def __repr__(self) -> str:
        return f"<Claim of task {self.id} ({self.task_path}) attempt {self.number}>"

    def __str__(self) -> str:
        return f"Task {self.id} ({self.task_path}) attempt {self.number}"

    def log_fields(self) -> dict[str, Any]:
        """Return what log records carry about the task."""
        return {"task_id": self.id, "task_path": self.task_path, "queue": self.queue, "attempt": self.number}
