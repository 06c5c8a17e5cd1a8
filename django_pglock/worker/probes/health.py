"""Does the worker live, and does it work? Answered from what its parts note anyway, so an answer waits for nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from django_pglock.conf import get_settings

if TYPE_CHECKING:
    from django_pglock.worker.worker import Worker

#: How many times HEARTBEAT_LIMIT a part may be silent. Once would be too strict: it may wait for the lock of a table
#: that is being changed, and to start the process again would only cost it the tasks that it runs.
PATIENCE = 2


class Health:
    """What may be asked of a worker from outside. Each answer is a sentence that says what is wrong, or None.

    The two must not be confused: a worker without database is not ready, and no worse for that. To start it again
    helps nobody.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def stuck(self) -> str | None:
        """Say which part shows no life."""
        if missing := self.missing():
            return missing
        now, bound = time.monotonic(), PATIENCE * get_settings().HEARTBEAT_LIMIT
        for service in self.worker.services:
            if service.is_running and not service.stopping.is_set() and now - service.awake_by > bound:
                return f"The {service.name} has shown no life for {now - service.awake_by:.0f} s."
        return None

    def missing(self) -> str | None:
        """Say which part has ended although nobody asked for that. It does not come back."""
        for service in self.worker.services:
            if service.is_missing:
                return f"The {service.name} has ended."
        return "A thread of the executor has ended." if self.worker.executor.is_missing else None

    def unready(self) -> str | None:
        """Say why the worker claims nothing."""
        heartbeat, fetcher = self.worker.heartbeat, self.worker.fetcher
        if self.worker.is_stopping:
            return "The worker is stopping."
        if heartbeat.pending:
            return "Migrations of django_pglock are pending."
        if not heartbeat.is_connected:
            return "The database is away."
        age = self.beat_age()
        if age is None:
            return "The first heartbeat is not written yet."
        if age > get_settings().HEARTBEAT_LIMIT:
            return f"No heartbeat could be written for {age:.0f} s."
        if not fetcher.is_claiming:
            return "The fetcher does not claim at the moment."
        return self.stuck()

    def beat_age(self) -> float | None:
        """Return the seconds since the last heartbeat that was written, None before the first."""
        beat_at = self.worker.heartbeat.beat_at
        return None if beat_at is None else time.monotonic() - beat_at
