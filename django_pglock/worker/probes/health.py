"""Health: does the worker live, and does it work? Answered from what its parts note anyway, so no answer waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from django_pglock.conf import get_settings
from django_pglock.store.liveness import silent_after
from django_pglock.worker.service import Service

#: How many times HEARTBEAT_LIMIT a part may show no life. Once would be too strict: it may wait for the lock of a table
#: that is being changed, and a restart of the process would only lose the tasks that it runs.
STUCK_AFTER = 2


class Heartbeat(Protocol):
    """The heartbeat of the worker."""

    pending: list[str]
    beat_at: float | None

    @property
    def is_connected(self) -> bool:
        """Whether it has a database session."""


class Fetcher(Protocol):
    """The fetcher of the worker."""

    is_claiming: bool


class Executor(Protocol):
    """The threads that run tasks."""

    @property
    def is_missing(self) -> bool:
        """Whether one of them has ended although nobody has stopped it."""


class Health:
    """What may be asked of a worker from outside. Each answer is a sentence that says what is wrong, or None.

    To live and to work are two questions: a worker without database is not ready, but a restart would not help.
    """

    def __init__(
        self,
        services: Sequence[Service],
        *,
        heartbeat: Heartbeat,
        fetcher: Fetcher,
        executor: Executor,
        is_stopping: Callable[[], bool],
    ) -> None:
        self.services = services
        self.heartbeat = heartbeat
        self.fetcher = fetcher
        self.executor = executor
        self.is_stopping = is_stopping

    def stuck(self) -> str | None:
        """Say which part shows no life."""
        if missing := self.missing():
            return missing
        now, bound = time.monotonic(), STUCK_AFTER * get_settings().HEARTBEAT_LIMIT
        for service in self.services:
            if service.is_running and not service.stopping.is_set() and now - service.awake_by > bound:
                return f"The {service.name} has not responded for {now - service.awake_by:.0f} s."
        return None

    def missing(self) -> str | None:
        """Say which part has ended although nobody has stopped it. It does not come back."""
        for service in self.services:
            if service.is_missing:
                return f"The {service.name} has ended."
        return "A thread of the executor has ended." if self.executor.is_missing else None

    def unready(self) -> str | None:
        """Say why the worker claims nothing."""
        if self.is_stopping():
            return "The worker is stopping."
        if self.heartbeat.pending:
            return "Migrations of django_pglock are pending."
        if not self.heartbeat.is_connected:
            return "The worker has no connection to the database."
        age = self.beat_age()
        if age is None:
            return "The first heartbeat is not written yet."
        if age > silent_after():
            return f"The last heartbeat was written {age:.0f} s ago."
        if not self.fetcher.is_claiming:
            return "The fetcher claims no tasks at the moment."
        return self.stuck()

    def beat_age(self) -> float | None:
        """Return the seconds since the last heartbeat that was written, None before the first."""
        beat_at = self.heartbeat.beat_at
        return None if beat_at is None else time.monotonic() - beat_at
