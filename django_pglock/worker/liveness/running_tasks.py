"""The service for running tasks: passes on cancel requests, answers requests for stacks, and writes progress.

The thread of the heartbeat does not do this, because it needs a session. To open one may take longer than other workers
tolerate a missing heartbeat, for example if a pooler is paused. For the same reason, this service also renews the
instructions of the heartbeat process, and compares this worker's tasks in the table with those in flight.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from django_pglock.conf import get_settings
from django_pglock.store.requests_to_worker import answer_stack, requests_to
from django_pglock.worker.identity import Identity
from django_pglock.worker.in_flight import InFlight
from django_pglock.worker.liveness.claim_comparison import ClaimComparison
from django_pglock.worker.liveness.heartbeat_process import HeartbeatProcess
from django_pglock.worker.service import ConnectedService
from django_pglock.worker.shared_sessions import SharedSessions

#: Seconds between two writes of the progress of running tasks.
BETWEEN_PROGRESS = 1.0


class Progress(Protocol):
    """Writes the progress that running tasks report."""

    @property
    def is_new(self) -> bool:
        """Whether there is progress that is not written yet."""

    def write(self) -> None:
        """Write the new progress."""


class RunningTasks(ConnectedService):
    """Queries for requests once in a heartbeat interval, or when it is woken, while tasks are in flight.

    ``cancel`` is called with the ids and attempts of running tasks whose cancel was requested, after each query until
    they have ended. ``stack_of`` returns the stack of a running task as text, by id and attempt.

    A pass takes a session only if it needs one. For an idle worker, this service needs no session.
    """

    name = "service for running tasks"
    waits_for_session = 1.0

    def __init__(
        self,
        in_flight: InFlight,
        using: str,
        identity: Identity,
        *,
        progress: Progress,
        cancel: Callable[[list[tuple[int, int]]], None],
        stack_of: Callable[[tuple[int, int]], str],
        process: HeartbeatProcess,
        sessions: SharedSessions,
    ) -> None:
        super().__init__(using, sessions)
        self.in_flight = in_flight
        self.identity = identity
        self.progress = progress
        self.cancel = cancel
        self.stack_of = stack_of
        self.process = process
        self.comparison = ClaimComparison(in_flight, using, identity.id)
        self._wakeup = threading.Event()
        # Whether to query because of a notification, and when to query without one.
        self._is_query_requested = False
        self._check_at = 0.0
        # Whether the present wait is the long one of an idle worker.
        self._waits_long = False
        in_flight.when_busy.append(self._end_long_wait)

    def wake(self) -> None:
        """Query now for requests about running tasks."""
        self._is_query_requested = True
        self._wakeup.set()

    def receive_request(self, task_id: str) -> None:
        """Query now if this task is in flight: its cancel or its stack was requested."""
        if task_id in map(str, self.in_flight.task_ids()):
            self.wake()

    def open(self) -> None:
        # A pass opens a session when it needs one.
        self._has_released = False

    def run_once(self) -> None:
        self._wakeup.clear()
        is_requested, self._is_query_requested = self._is_query_requested, False
        if self.in_flight.claims and (is_requested or time.monotonic() >= self._check_at):
            self._check_at = time.monotonic() + get_settings().HEARTBEAT_INTERVAL
            self._pass_on_requests()
        if self.progress.is_new:
            super().open()
            self.progress.write()
        if self.comparison.is_due:
            super().open()
            self.comparison.compare()
        if self.process.needs_instructions:
            super().open()
            self.process.renew_instructions()
        self.release_session()
        self._wait_for_query()

    def _pass_on_requests(self) -> None:
        super().open()
        requests = requests_to(self.using, self.identity.id)
        if requests.cancels:
            self.cancel(requests.cancels)
        for task, attempt in requests.stacks:
            answer_stack(self.using, task, attempt, self.identity.id, self.stack_of((task, attempt)))

    def close(self) -> None:
        # The answer to the last query may be lost.
        self._is_query_requested = True
        super().close()

    def _wait_for_query(self) -> None:
        """Wait until the next query. An idle worker waits longer, and its next claim ends the wait."""
        seconds = get_settings().HEARTBEAT_INTERVAL
        # The order matters: a claim that is added after this line ends the wait.
        self._waits_long = True
        if self.in_flight.claims:
            self._waits_long = False
            seconds = min(seconds, BETWEEN_PROGRESS, max(0.0, self._check_at - time.monotonic()))
        self.report_alive(seconds)
        self._wakeup.wait(seconds)

    def _end_long_wait(self) -> None:
        """Query in a moment, because most tasks have ended by then. For other threads."""
        if self._waits_long:
            self._waits_long = False
            moment = min(BETWEEN_PROGRESS, get_settings().HEARTBEAT_INTERVAL)
            self._check_at = max(self._check_at, time.monotonic() + moment)
            self._wakeup.set()
