"""The upkeep: promote due tasks, enqueue scheduled tasks, rescue tasks of dead workers, and prune.

Each parent runs this service. The oldest parents do a round nearly every heartbeat interval. All other parents are on
standby: they rarely do a round, in case the oldest do not. By the answer to each heartbeat, a parent knows which it is.
If it becomes one of the oldest, it begins at once. Rounds of several parents at once do no harm: each statement skips
the rows that another one has locked. Only one at a time promotes (``promote()``).

Each worker serves the schedules of the functions that it knows. Due ticks are enqueued together, and a tick that fails
is tried alone, so it does not affect the others.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from uuid import UUID

from django_pglock.conf import get_settings
from django_pglock.errors import TaskTimeout
from django_pglock.postgres.connections import connection_for, has_session_ended, is_read_only
from django_pglock.store.admit import KEYS_AT_ONCE, admit, blocked_keys
from django_pglock.store.claim import running_claims
from django_pglock.store.liveness import UPKEEP_PARENTS, delete_dead, deregister
from django_pglock.store.numbers import BETWEEN_DEPTHS, PAUSE_FACTOR, add_rescued, clock, count_depths, prune_numbers
from django_pglock.store.outcome import Failed, Failure, Retried
from django_pglock.store.prune import ages_of, prune_window, warn_of_references
from django_pglock.store.rate import delete_unused_rates, open_rates
from django_pglock.store.ready import UnknownTasks, next_due_in, unknown, unserved_queues
from django_pglock.store.release import WAITERS_AT_ONCE, orphaned_waiters, promote, release, restart_delays
from django_pglock.store.rescue import RESCUED_AT_ONCE, rescue
from django_pglock.store.schedules import ScheduleKeeper
from django_pglock.store.settle import settle
from django_pglock.store.steps import WAITS_AT_ONCE, missed_events, prune_events, wake_waiting
from django_pglock.tasks import registry
from django_pglock.tasks.retry import DEFAULT_BACKOFF, delay_after
from django_pglock.worker.child.in_flight import EndedClaim
from django_pglock.worker.child.logs import report
from django_pglock.worker.parent.heartbeat import Heartbeat
from django_pglock.worker.service import Service, logger

T = TypeVar("T")

#: Seconds between two rounds, as a share of the heartbeat interval. Together with the two missing heartbeats before,
#: the tasks of a killed worker run elsewhere within ten seconds at default settings.
ROUND_FACTOR = 0.9
#: A parent on standby, and one to which notifications come, multiplies the time between two rounds by this factor; one
#: on standby also that between two prunings.
STANDBY_FACTOR = 35
#: The number of tasks that one pruning reads. Seconds until the next one if no old task is left, and no old row of
#: other tables.
PRUNED_AT_ONCE, PRUNING_PAUSE, PAUSE_OF_OTHERS = 5000, 120.0, 600.0
#: Seconds until the next pruning if old tasks are left. Without a pause, pruning takes a core of the server, and claims
#: take a fifth longer. With this one, it deletes about 30,000 tasks a second.
BETWEEN_PRUNINGS = 0.1
#: Seconds between two searches for tasks that no worker can run, and before the first one. By then, workers that start
#: together have written which functions they know.
BETWEEN_WARNINGS = 30.0
#: A step of the server's clock in seconds that has to be noticed.
LEAST_STEP = 1.0
#: If there is nothing to do for so many seconds, the session is closed.
LINGER = 5.0
#: Seconds before due tasks whose rows are locked are tried again.
LOCKED_RETRY = 0.25


class Upkeep(Service):
    """Rounds of upkeep for the parent that has this heartbeat. It begins when it is woken for the first time."""

    name = "upkeep"

    def __init__(self, using: str, heartbeat: Heartbeat) -> None:
        super().__init__(using)
        self.heartbeat = heartbeat
        self.schedules = ScheduleKeeper(using)
        self._wakeup = threading.Event()
        # Seconds until the next pass; None: until it is woken.
        self._sleep: float | None = None
        # The workers that have ended, with the attempts because of which they were killed.
        self._ended: deque[tuple[UUID, Sequence[tuple[int, int]]]] = deque()
        # When tasks were last rescued: the next round rescues if that is negative. When a worker was last deleted.
        self._rescued_at, self._deleted_at = 0.0, -math.inf
        # When a step of the server's clock was last noticed, and how far it is ahead of time.monotonic(), at least.
        self._stepped_at, self._clock_ahead = 0.0, -math.inf
        # Where the last queries for orphaned keys, for orphaned waiters and for unused buckets ended, and the last
        # pruning.
        self._key, self._waiter, self._event, self._rate_key, self._pruned_to = "", 0, "", "", 0
        # When each of the rare steps is due, and whether the last pruning has not found all old tasks.
        self._due_at = {"_warn": time.monotonic() + BETWEEN_WARNINGS}
        self._prunes_on = False
        # The known tables of the project whose rows refuse the pruning of tasks.
        self._referring: set[str] = set()
        # The functions and the queues whose tasks no worker can run, and of which a warning was logged.
        self._warned: set[tuple[str, str]] = set()
        # The names of the steps that failed last time.
        self._failing: set[str] = set()

    def wake(self, *, rescues: bool = False) -> None:
        """Do a pass now, because a task may be due before the present sleep ends.

        ``rescues``: with a rescue, because heartbeats of others are missing.
        """
        if rescues:
            self._rescued_at = min(self._rescued_at, 0.0)
        self._wakeup.set()

    def end_worker(self, worker: UUID, overruns: Sequence[tuple[int, int]]) -> None:
        """Delete the row of a worker that has ended, and rescue its tasks now.

        ``overruns``: the attempts, by task and number, that did not end after their timeouts, so it was killed.
        """
        self._ended.append((worker, overruns))
        self.wake()

    def open(self) -> None:
        """Nothing: a pass opens the session when its sleep is over."""

    def run_once(self) -> None:
        self._wakeup.wait(self._sleep)
        self._wakeup.clear()
        if self.stopping.is_set():
            return
        # After a failure, the pause is long enough.
        self._sleep = 0.0
        super().open()
        self._end_workers()
        round_in, tick_in = self._attempt(self._round), self._attempt(self._keep_schedules)
        for step in (self._prune_others, self._prune, self._count_depths, self._warn):
            if time.monotonic() >= self._due_at.get(step.__name__, 0.0):
                pause = self._attempt(step) or 0.0
                self._due_at[step.__name__] = time.monotonic() + pause
        waits = [self._between_rounds, round_in, tick_in, BETWEEN_PRUNINGS if self._prunes_on else None]
        self._sleep = max(0.0, min(seconds for seconds in waits if seconds is not None))
        if self._sleep > LINGER:
            self.close()

    def flush(self) -> None:
        # The last children have ended. If they did so in order, nothing is left to rescue.
        if self._ended:
            super().open()
            self._end_workers()
            self._attempt(self._round)

    @property
    def _often(self) -> float:
        """Seconds between two rounds that find something to do."""
        return get_settings().HEARTBEAT_INTERVAL * ROUND_FACTOR

    @property
    def _standby_factor(self) -> int:
        """By what the pauses of this parent are multiplied."""
        return 1 if (self.heartbeat.older_parents or 0) < UPKEEP_PARENTS else STANDBY_FACTOR

    @property
    def _between_rounds(self) -> float:
        """Seconds between two rounds, if nothing is due before. Rare ones have jitter, to spread those of parents."""
        # The server may commit the last claim of a child after its death, and after the rescue of its tasks.
        has_ended = time.monotonic() - self._deleted_at < get_settings().HEARTBEAT_LIMIT
        if has_ended or (self._standby_factor == 1 and not self.heartbeat.is_quiet):
            return self._often
        return self._often * STANDBY_FACTOR * random.uniform(0.8, 1.2)  # noqa: S311

    def _end_workers(self) -> None:
        """Delete the rows of workers that have ended. Then they are dead, and the next round rescues their tasks."""
        while self._ended:
            worker, overruns = self._ended[0]
            for task, attempt in overruns:
                self._attempt(end_overrun, self.using, task, attempt, worker)
            deregister(self.using, worker)
            self._ended.popleft()
            self._rescued_at, self._deleted_at = -math.inf, time.monotonic()

    def _round(self) -> float | None:
        """Promote, rescue and admit. Return the seconds until the next task is due, None if that is not known."""
        promoted = self._attempt(promote, self.using) or 0
        keys, awaited, events = self._attempt(open_rates, self.using) or [], [], []
        has_moved = bool(promoted or keys)
        if time.monotonic() - self._rescued_at >= self._often:
            self._rescued_at = time.monotonic()
            self._attempt(self._notice_step_of_clock)
            self._attempt(self._rescue)
            keys += self._attempt(self._orphaned_keys) or []
            awaited = self._attempt(self._orphaned_waiters) or []
            events = self._attempt(self._missed_events) or []
        promoted += self._attempt(wake_waiting, self.using, events) or 0
        promoted += self._attempt(release, self.using, awaited) or 0
        promoted += self._attempt(admit, self.using, keys) or 0
        if promoted:
            self.heartbeat.note_promoted()
        due_in = self._attempt(next_due_in, self.using)
        if due_in is not None and due_in <= 0 and not (has_moved or promoted):
            # A task is due and was not promoted, because its row is locked.
            return LOCKED_RETRY
        return due_in

    def _notice_step_of_clock(self) -> None:
        """Restart the delays of retries if the server's clock was put back, for example by a failover.

        After a step, also one forward, and after this host has slept, the heartbeats of others only seem to be missing.
        """
        before, now, after = time.monotonic(), clock(self.using), time.monotonic()
        forward, back = now - after - self._clock_ahead, self._clock_ahead - (now - before)
        self._clock_ahead = now - after
        if max(forward, back) > LEAST_STEP:
            self._stepped_at = after
        if back > LEAST_STEP:
            restarted = restart_delays(self.using)
            logger.warning(
                "The clock of the database server was put back by %.0f s. Delays of retries that were restarted: %d. "
                "All other tasks run when that clock shows their date.",
                back,
                restarted,
            )

    def _attempt(self, step: Callable[..., T], *values: Any) -> T | None:
        """Return what a step returns, None if it fails. A failure affects no other step while the session lives."""
        name, connection = step.__qualname__, connection_for(self.using)
        session = connection.connection
        try:
            answer = step(*values)
        except Exception as error:
            # Django drops a session that was lost in a transaction, and would open another one without our settings. A
            # read-only session leads to a server that is not the primary. The next session may lead to the primary.
            if connection.connection is not session or has_session_ended(connection) or is_read_only(error):
                raise
            if name not in self._failing:
                logger.warning("The upkeep step %s failed. The worker keeps trying.", name, exc_info=True)
            self._failing.add(name)
            return None
        if name in self._failing:
            logger.warning("The upkeep step %s works again.", name)
            self._failing.remove(name)
        return answer

    # Each of the rare steps returns the seconds until it is due again.

    def _count_depths(self) -> float:
        """Count how many tasks each queue has. Only upkeep workers do this, and only one of them at a time."""
        return max(BETWEEN_DEPTHS, PAUSE_FACTOR * count_depths(self.using)) if self._standby_factor == 1 else 0.0

    def _warn(self) -> float:
        """Warn once of tasks that no worker can run, and again after they were gone. Only the oldest parent does."""
        if self.heartbeat.older_parents:
            return 0.0
        found: dict[tuple[str, str], str] = {}
        if self.heartbeat.ready_queues:
            found = {("function", each.task_path): _no_function(each) for each in unknown(self.using)}
            found |= {("queue", queue): _no_worker(queue) for queue in unserved_queues(self.using)}
        for key in [each for each in found if each not in self._warned]:
            logger.warning("%s", found[key])
        self._warned = set(found)
        return BETWEEN_WARNINGS

    def _keep_schedules(self) -> float | None:
        """Enqueue the tasks of due ticks. Return the seconds until the next tick, None if there is none."""
        ticks = self.schedules.keep()
        if ticks.tasks:
            self.heartbeat.note_promoted()
        return ticks.next_in

    # Keys and waiters whose tasks are still blocked after a crash. Some of them are read at a time.

    def _orphaned_keys(self) -> list[str]:
        keys = blocked_keys(self.using, self._key)
        self._key = keys[-1] if len(keys) == KEYS_AT_ONCE else ""
        return keys

    def _orphaned_waiters(self) -> list[int]:
        waiters = orphaned_waiters(self.using, self._waiter)
        self._waiter = waiters[-1][0] if len(waiters) == WAITERS_AT_ONCE else 0
        return [awaited for _, awaited in waiters if awaited is not None]

    def _missed_events(self) -> list[str]:
        events = missed_events(self.using, self._event)
        self._event = events[-1][0] if len(events) == WAITS_AT_ONCE else ""
        return [event for event, is_there in events if is_there]

    def _prune(self) -> float:
        """Delete some old tasks. Two workers may do this at once."""
        count, self._pruned_to = prune_window(self.using, self._pruned_to, ages_of(), batch=PRUNED_AT_ONCE)
        self._prunes_on = bool(count and self._pruned_to)
        soon = BETWEEN_PRUNINGS if self._prunes_on else self._often
        return soon if count or self._pruned_to else PRUNING_PAUSE * self._standby_factor

    def _prune_others(self) -> float:
        """Delete old rows of other tables. Look for tables of the project whose rows refuse the pruning of tasks."""
        warn_of_references(self.using, self._referring)
        prune_events(self.using)
        unused, self._rate_key = delete_unused_rates(self.using, self._rate_key)
        has_more = prune_numbers(self.using) or unused
        return self._often if has_more else PAUSE_OF_OTHERS * self._standby_factor

    def _rescue(self) -> None:
        unbroken = min(self.heartbeat.unbroken_for(), time.monotonic() - self._stepped_at)
        found = rescue(self.using, unbroken=unbroken)
        if len(found) == RESCUED_AT_ONCE:
            self.wake(rescues=True)
        for task in found:
            text = "Task %d (%r) was taken back from worker %s, which is dead; it is %s now."
            logger.warning(text, task.id, task.task_path, task.worker, task.status)
        delete_dead(self.using, unbroken=unbroken)
        self._attempt(add_rescued, self.using, [(each.queue, each.task_path, each.status) for each in found])


def _no_function(tasks: UnknownTasks) -> str:
    return (
        f"{'1 task' if tasks.waiting == 1 else f'{tasks.waiting} tasks'} of queue {tasks.queue!r} "
        f"{'calls' if tasks.waiting == 1 else 'call'} {tasks.task_path!r}, which no running worker has imported. "
        "Import its module in the workers, or deploy the version that defines it."
    )


def _no_worker(queue: str) -> str:
    return (
        f"Tasks wait in the queue {queue!r}, which no running worker serves. Start a worker for it, or move them: "
        f"manage.py locktasks move-to-queue --queue {queue!r} --to OTHER"
    )


def end_overrun(using: str, task: int, attempt: int, worker: UUID) -> None:
    """End an attempt by its timeout: its function kept the child from running, so the child was killed.

    The retry policy of the function applies. But no code of the project runs here: instead of a backoff that is a
    function, the default one is used.
    """
    for claim in running_claims(using, task, attempt, worker):
        error = TaskTimeout("The attempt took longer than its timeout, and kept its process from running.")
        failure = Failure.of(error)
        definition = registry.find(claim.task_path)
        outcome: Failed | Retried = Failed(failure)
        if definition is not None and claim.retries < claim.max_retries and definition.can_retry(error):
            backoff = DEFAULT_BACKOFF if callable(definition.backoff) else definition.backoff
            failures = claim.retries + 1
            outcome = Retried(failure, delay_after(backoff, failures=failures, exception=error, result=lambda: None))
        if settle(using, [(claim, outcome)], worker):
            report(EndedClaim(claim, outcome))
        release(using, [claim.id] if isinstance(outcome, Failed) else [])
        admit(using, [] if claim.lock_key is None else [claim.lock_key])
