"""The service for running tasks: passes on cancel requests, answers requests for stacks, and writes progress.

The thread of the heartbeat does not do this, because it needs a session. To open one may take longer than other workers
tolerate a missing heartbeat, for example if a pooler is paused. For the same reason, this service also renews the
instructions of the heartbeat process, and compares this worker's tasks in the table with those in flight.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from uuid import UUID

from django_pglock.conf import get_settings
from django_pglock.store.requests_to_worker import answer_stack, requests_to
from django_pglock.store.settle import give_back, server_time
from django_pglock.worker.in_flight import InFlight, Progress
from django_pglock.worker.liveness.heartbeat_process import HeartbeatProcess
from django_pglock.worker.options import Identity
from django_pglock.worker.service import ConnectedService, SharedSessions, logger

#: Seconds between two writes of the progress of running tasks.
BETWEEN_PROGRESS = 1.0


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


# Compares this worker's tasks in the table with those in flight, and gives back claims whose answer was lost.
#
# A claim whose answer was lost may be committed after the fetcher, in its next session, has searched for such claims.
# Some seconds later, the claim either is committed or will never be.


#: After this multiple of HEARTBEAT_LIMIT, a claim whose answer was lost either is committed or will never be, and a
#: comparison has run since then.
CERTAIN_AFTER = 3.0


class ClaimComparison:
    """Compares once in ``HEARTBEAT_LIMIT``, as long as the worker has claims or may have claims."""

    def __init__(self, in_flight: InFlight, using: str, worker: UUID) -> None:
        self.in_flight = in_flight
        self.using = using
        self.worker = worker
        self._compared_at = time.monotonic()
        # How many tasks had been claimed at the last comparison, and whether tasks were in flight then.
        self._claimed = 0
        self._had_claims = False

    @property
    def is_due(self) -> bool:
        """Whether it is time to compare."""
        limit, now = get_settings().HEARTBEAT_LIMIT, time.monotonic()
        if now - self._compared_at < limit or self.in_flight.is_claiming:
            return False
        return (
            self._had_claims
            or bool(self.in_flight.claims)
            or self.in_flight.claimed != self._claimed
            or now - self.in_flight.answer_lost_at < CERTAIN_AFTER * limit
        )

    def compare(self) -> None:
        """Give back old claims of this worker that are not in flight."""
        # This process may freeze between the list and the statement, and claims that it makes meanwhile are not in the
        # list. A claim of a group may wait for a lock for longer than the limit, and its date is that of its message.
        # The order matters: claims that begin after the first line are excluded by their date.
        before, group_keys = server_time(self.using), self.in_flight.group_keys_being_claimed()
        if self.in_flight.is_claiming:
            return
        self._compared_at = time.monotonic()
        self._claimed, self._had_claims = self.in_flight.claimed, bool(self.in_flight.claims)
        known, limit = self.in_flight.task_ids(), get_settings().HEARTBEAT_LIMIT
        lost = give_back(self.using, self.worker, known, older_than=limit, before=before, except_keys=group_keys)
        if lost:
            logger.warning("Gave back %d tasks that were claimed for this worker and never reached it.", lost)
