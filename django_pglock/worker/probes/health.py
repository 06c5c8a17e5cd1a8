"""Health: whether the worker lives, and whether it works. No answer waits, because it only reads attributes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from django_pglock.conf import get_settings
from django_pglock.store.liveness import silent_after
from django_pglock.worker.service import Service

#: A part counts as hung after this multiple of HEARTBEAT_LIMIT without a response. A multiple of one would be too
#: strict: the part may wait for a lock on a table that is being changed. A restart of the process would not help, and
#: would interrupt the running tasks.
HUNG_AFTER = 2
CANNOT_BEGIN = (
    "No task could begin in this process, although it tried: it has no memory, threads, file descriptors or sessions "
    "left for them."
)


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
        """Whether one of them has ended without having been stopped."""

    @property
    def is_unable(self) -> bool:
        """Whether they cannot begin tasks, for example because the process has no memory left."""


class Health:
    """The health of a worker, for probes. Each answer is a sentence about a problem, or None.

    There are two questions: does the worker live, and does it work? A worker without a database connection does not
    work, but a restart would not help.
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
        # By part: until when it was to report, and at how many checks it had not.
        self._silent: dict[Service, tuple[float, int]] = {}

    def hung(self) -> str | None:
        """Return which part has ended or hangs."""
        if missing := self.missing():
            return missing
        now, bound = time.monotonic(), HUNG_AFTER * get_settings().HEARTBEAT_LIMIT
        for service in self.services:
            if service.is_running and not service.stopping.is_set() and now - service.next_report_by > bound:
                return f"The {service.name} has not responded for {now - service.next_report_by:.0f} s."
        return None

    def stuck(self) -> str | None:
        """Return which part hangs in Python code, for example in the log. To be called once a second.

        It counts calls instead of seconds, because time also passes while the process is stopped. ``Deadlines`` ends
        the waits for the database.
        """
        for service in self.services:
            due, calls = self._silent.get(service, (math.inf, 0))
            is_silent = due == service.next_report_by < time.monotonic() and service.statement_in_progress() is None
            calls = calls + 1 if is_silent and service.is_running else 0
            self._silent[service] = service.next_report_by, calls
            if calls > HUNG_AFTER * get_settings().HEARTBEAT_LIMIT:
                return f"The {service.name} has not responded for {calls} s."
        return None

    def missing(self) -> str | None:
        """Return which part has ended without having been stopped, or can do nothing. It does not start again."""
        for service in self.services:
            if service.is_missing:
                return f"The {service.name} has ended."
        if self.executor.is_missing:
            return "A thread of the executor has ended."
        return CANNOT_BEGIN if self.executor.is_unable else None

    def unready(self) -> str | None:
        """Return why the worker claims no tasks."""
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
        return self.hung()

    def beat_age(self) -> float | None:
        """Return the seconds since the last heartbeat was written; None before the first one."""
        beat_at = self.heartbeat.beat_at
        return None if beat_at is None else time.monotonic() - beat_at
