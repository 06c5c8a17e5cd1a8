"""The upkeep: promote due tasks, enqueue scheduled tasks, rescue tasks of dead workers, and prune.

Each parent runs this service, but only one at a time does a round. A round is a transaction that begins with an attempt
to take an advisory lock. The lock only saves work. Correctness does not depend on it. A parent that freezes in the
middle of its round would block the rounds of the others. So the server ends a session that is idle in a round.

The oldest parents do a round nearly every heartbeat interval. All other parents are on standby: they rarely do a round,
in case the oldest do not. By the answer to each heartbeat, a parent knows which it is. If it becomes one of the oldest,
it begins at once. The oldest one also searches for ready tasks of which no sleeping worker was notified, so that the
other workers need not.

Schedules are not part of a round. Each worker serves the schedules of the functions that it knows. Due ticks are
enqueued together, and a tick that fails is tried alone, so it does not affect the others.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any, TypeVar
from uuid import UUID

from django.db import transaction

from django_pglock.conf import get_settings
from django_pglock.error_reading import one_line
from django_pglock.errors import TaskTimeout
from django_pglock.postgres.connections import CONNECTION_ERRORS, connection_for, has_session_ended, is_read_only
from django_pglock.store.admit import KEYS_AT_ONCE, admit, blocked_keys
from django_pglock.store.claim import running_claims
from django_pglock.store.count import COUNTED, QueueCounts
from django_pglock.store.liveness import UPKEEP_PARENTS, delete_dead, deregister, try_upkeep_lock
from django_pglock.store.numbers import (
    BETWEEN_DEPTHS,
    MAX_AGE,
    PAUSE_FACTOR,
    Total,
    add_rescued,
    clock,
    count_depths,
    counters,
    depths,
    prune_numbers,
)
from django_pglock.store.outcome import Failed, Failure, Retried
from django_pglock.store.prune import ages_of, prune_window, warn_of_references
from django_pglock.store.rate import delete_unused_rates, open_rates
from django_pglock.store.ready import (
    UnknownTasks,
    next_due_in,
    promote,
    restart_delays,
    unknown,
    unserved_queues,
)
from django_pglock.store.release import WAITERS_AT_ONCE, orphaned_waiters, release
from django_pglock.store.rescue import RESCUED_AT_ONCE, Rescued, rescue
from django_pglock.store.schedules import ScheduleKeeper
from django_pglock.store.settle import settle
from django_pglock.tasks import registry
from django_pglock.tasks.retry import DEFAULT_BACKOFF, delay_after
from django_pglock.worker.child.in_flight import EndedClaim
from django_pglock.worker.child.logs import report
from django_pglock.worker.service import ConnectedService, logger

T = TypeVar("T")

#: Seconds between two rounds, as a share of the heartbeat interval. Together with the two missing heartbeats before,
#: the tasks of a killed worker run elsewhere within ten seconds at default settings.
ROUND_FACTOR = 0.9
#: A parent on standby, and one to which notifications come, multiplies the time between two rounds by this factor; one
#: on standby also that between two prunings.
STANDBY_FACTOR = 20
#: One round repeats the query for tasks of dead workers up to this number of times, as long as its limit is reached.
RESCUES = 5
#: The number of tasks that one pruning reads, and seconds until the next pruning if no old task is left.
PRUNED_AT_ONCE, PRUNING_PAUSE = 5000, 60.0
#: Seconds for which one pruning continues while it finds old tasks, and seconds until the next one if some are left.
#: They are short, because the same thread promotes due tasks, and rescues tasks of dead workers.
TIME_TO_PRUNE, BETWEEN_PRUNINGS = 0.2, 0.1
#: A step of the server's clock in seconds that has to be noticed.
LEAST_STEP = 1.0
#: Seconds without anything to do after which thread and session end.
LINGER = 5.0
#: Seconds before the next attempt at a round that has to rescue the tasks of an own child, if another parent is in one.
BEFORE_URGENT_ROUND = 0.05
#: Seconds before due tasks whose rows are locked are tried again. Doubled each time, up to the second number.
FIRST_LOCKED_RETRY, LONGEST_LOCKED_RETRY = 0.01, 1.0


class Upkeep(ConnectedService):
    """Rounds of upkeep.

    ``promoted`` is called when tasks have become ready. ``unbroken_for`` returns for how many seconds the heartbeats of
    this parent have come without interruption, ``is_quiet`` whether a notification comes for each scheduled task.

    Its thread and its session end if there is nothing to do for some time. Then ``on_rest`` is called with the seconds
    after which ``wake()`` has to be called, which starts them again.
    """

    name = "upkeep"

    def __init__(
        self,
        using: str,
        *,
        promoted: Callable[[], None],
        unbroken_for: Callable[[], float],
        is_quiet: Callable[[], bool],
        on_rest: Callable[[float], None],
    ) -> None:
        super().__init__(using)
        self.promoted = promoted
        self.unbroken_for = unbroken_for
        self.is_quiet = is_quiet
        self.on_rest = on_rest
        # Whether there is no thread, because there is nothing to do.
        self._is_resting = True
        self._resting = threading.Lock()
        # For how many seconds there is nothing to do, if the thread is to end.
        self._rest: float | None = None
        # The number of older parents that do the upkeep.
        self._older_parents = 0
        self._wakeup = threading.Event()
        self.unknown = UnknownReport(using)
        self.readings = Readings(using)
        self._count_depths_at = 0.0
        self.schedules = ScheduleKeeper(using)
        self._rescued_at = 0.0
        # The workers that have ended, with the attempts because of which they were killed.
        self._ended: SimpleQueue[tuple[UUID, Sequence[tuple[int, int]]]] = SimpleQueue()
        # When the last of them was deleted.
        self._deleted_at = -math.inf
        # When a step of the server's clock was last noticed.
        self._stepped_at = 0.0
        # How far the server's clock is ahead of time.monotonic(), at least.
        self._clock_ahead = -math.inf
        # Where the last queries for orphaned keys, for orphaned waiters and for unused buckets ended.
        self._key, self._waiter, self._rate_key = "", 0, ""
        # The task id up to which pruning has come, and when pruning continues.
        self._pruned_to, self._prune_at = 0, 0.0
        # Whether the last pruning has not found all old tasks.
        self._prunes_on = False
        # The known tables of the project whose rows refuse the pruning of tasks.
        self._referring: set[str] = set()
        # The tasks that this round has rescued: queue, function and new status.
        self._rescued: list[tuple[str, str, str]] = []
        # The names of the steps that failed last time.
        self._failing: set[str] = set()
        # Seconds until due tasks whose rows are locked are tried again.
        self._locked_retry = 0.0

    def wake(self) -> None:
        """Do a pass now, because a task may be due before the present sleep ends."""
        with self._resting:
            self._wakeup.set()
            if self._is_resting:
                self._begin()

    def stop(self) -> None:
        self.stopping.set()
        self.wake()

    def goes_on(self) -> bool:
        return not self.stopping.is_set() and self._rest is None

    def finish(self) -> None:
        # The last thing that this thread does: from here on, another one may use the session.
        with self._resting:
            rest, self._rest = self._rest, None
            if rest is None:
                return
            if self._wakeup.is_set():
                self._begin()
                return
            self._is_resting = True
        self.on_rest(rest)

    def _begin(self) -> None:
        """Start the thread. If the process may have no more threads, try again later."""
        try:
            self.start()
            self._is_resting = False
        except RuntimeError as error:
            logger.warning("The upkeep cannot begin, and tries again: %s", error)
            self._is_resting = True
            self.on_rest(LINGER)

    def set_older_parents(self, older_parents: int) -> None:
        """Note how many older parents do the upkeep. If this one becomes one of the oldest, it begins at once."""
        before, self._older_parents = self._older_parents, older_parents
        if older_parents < UPKEEP_PARENTS <= before:
            self.wake()

    def end_worker(self, worker: UUID, overruns: Sequence[tuple[int, int]]) -> None:
        """Delete the row of a worker that has ended, and rescue its tasks now. For the loop's thread.

        ``overruns``: the attempts, by task and number, that did not end after their timeouts, so it was killed.
        """
        self._ended.put((worker, overruns))
        self.wake()

    def rescue_soon(self) -> None:
        """Do a round with a rescue now, because heartbeats of others are missing."""
        self._rescued_at = min(self._rescued_at, 0.0)
        self.wake()

    @property
    def _between_rounds(self) -> float:
        """Seconds between two rounds, if nothing is due before. Rare ones have jitter, to spread those of parents."""
        often, limit = get_settings().HEARTBEAT_INTERVAL * ROUND_FACTOR, get_settings().HEARTBEAT_LIMIT
        # The server may commit the last claim of a child after its death, and after the rescue of its tasks.
        if self.readings.is_requested or time.monotonic() - self._deleted_at < limit:
            return often
        if self._older_parents < UPKEEP_PARENTS and not self.is_quiet():
            return often
        return often * STANDBY_FACTOR * random.uniform(0.8, 1.2)  # noqa: S311

    def run_once(self) -> None:
        self._wakeup.clear()
        self._end_workers()
        waits = (
            self._between_rounds,
            self._attempt(self._round),
            self._attempt(self._keep_schedules),
            BETWEEN_PRUNINGS if self._prunes_on else None,
        )
        self._attempt(self._count_depths)
        self._attempt(self.readings.run_if_due)
        sleep = max(0.0, min(seconds for seconds in waits if seconds is not None))
        self.report_alive(sleep)
        if sleep <= LINGER:
            self._wakeup.wait(sleep)
            return
        self.close_session()
        self._rest = sleep

    def flush(self) -> None:
        # The last children have ended. If they did so in order, nothing is left to rescue.
        try:
            if self.stopping.is_set() and self._end_workers():
                while self._attempt(self._round) == BEFORE_URGENT_ROUND:
                    time.sleep(BEFORE_URGENT_ROUND)
        except CONNECTION_ERRORS as error:
            logger.warning("The rows of this worker could not be deleted. Others will delete them: %s", one_line(error))

    def _end_workers(self) -> bool:
        """Delete the rows of workers that have ended. Then they are dead, and the next round rescues their tasks."""
        has_ended = False
        while not self._ended.empty():
            worker, overruns = self._ended.get()
            try:
                self.open()
                for task, attempt in overruns:
                    self._attempt(end_overrun, self.using, task, attempt, worker)
                deregister(self.using, worker)
            except BaseException:
                self._ended.put((worker, overruns))
                raise
            has_ended, self._rescued_at, self._deleted_at = True, -math.inf, time.monotonic()
        return has_ended

    def _round(self) -> float | None:
        """Do one round. Return the seconds until the next task is due, None if that is not known."""
        self._rescued = []
        with transaction.atomic(using=self.using, durable=True):
            if not try_upkeep_lock(self.using):
                return BEFORE_URGENT_ROUND if self._rescued_at < 0 else None
            promoted = self._attempt(promote, self.using) or 0
            keys, awaited = self._attempt(open_rates, self.using) or [], []
            has_moved = bool(promoted or keys)
            if time.monotonic() - self._rescued_at >= get_settings().HEARTBEAT_INTERVAL * ROUND_FACTOR:
                self._rescued_at = time.monotonic()
                self._attempt(self._notice_step_of_clock)
                self._attempt(self._rescue)
                keys += self._attempt(self._orphaned_keys) or []
                awaited = self._attempt(self._orphaned_waiters) or []
            due_in = self._attempt(next_due_in, self.using)
        # Outside of the round's transaction, because all workers write the same rows of numbers.
        self._attempt(add_rescued, self.using, self._rescued)
        # Also outside, because admission holds the locks of the keys to the end of a transaction.
        if keys or awaited:
            promoted += self._attempt(release, self.using, awaited) or 0
            promoted += self._attempt(admit, self.using, keys) or 0
            due_in = self._attempt(next_due_in, self.using)
        if promoted:
            self.promoted()
        if not self._older_parents:
            self._attempt(self.unknown.run_if_due)
        if time.monotonic() >= self._prune_at:
            self._attempt(self._prune)
        return self._pause(due_in, has_moved=has_moved or promoted > 0)

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
            with transaction.atomic(using=self.using) if connection.in_atomic_block else nullcontext():
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

    def _pause(self, due_in: float | None, *, has_moved: bool) -> float | None:
        """Return ``due_in``; or a longer time if a task is due but was not promoted, because its row is locked."""
        if has_moved or due_in is None or due_in > 0:
            self._locked_retry = 0.0
            return due_in
        self._locked_retry = min(LONGEST_LOCKED_RETRY, 2 * self._locked_retry or FIRST_LOCKED_RETRY)
        return self._locked_retry

    def _count_depths(self) -> None:
        """Count how many tasks each queue has. Only upkeep workers do this, and only one of them at a time."""
        now = time.monotonic()
        if self._older_parents < UPKEEP_PARENTS and now >= self._count_depths_at:
            took = count_depths(self.using)
            self._count_depths_at = now + max(BETWEEN_DEPTHS, PAUSE_FACTOR * took)

    def _keep_schedules(self) -> float | None:
        """Enqueue the tasks of due ticks. Return the seconds until the next tick, None if there is none."""
        ticks = self.schedules.keep()
        if ticks.tasks:
            self.promoted()
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

    def _prune(self) -> None:
        """Delete some old tasks. Outside of the round's transaction, because two workers may do this at once."""
        factor = 1 if self._older_parents < UPKEEP_PARENTS else STANDBY_FACTOR
        pause, self._prunes_on = PRUNING_PAUSE * factor, False
        if not self._pruned_to:
            warn_of_references(self.using, self._referring)
        end = time.monotonic() + TIME_TO_PRUNE
        while True:
            count, self._pruned_to = prune_window(self.using, self._pruned_to, ages_of(), batch=PRUNED_AT_ONCE)
            has_more = bool(count and self._pruned_to)
            if not has_more or time.monotonic() >= end:
                break
        numbers = self._attempt(prune_numbers, self.using)
        unused, self._rate_key = delete_unused_rates(self.using, self._rate_key)
        if unused or count or self._pruned_to or numbers:
            pause = BETWEEN_PRUNINGS if has_more else get_settings().HEARTBEAT_INTERVAL * ROUND_FACTOR
        self._prune_at, self._prunes_on = time.monotonic() + pause, has_more

    def _rescue(self) -> None:
        found: list[Rescued] = []
        unbroken = min(self.unbroken_for(), time.monotonic() - self._stepped_at)
        for _ in range(RESCUES):
            rescued = rescue(self.using, unbroken=unbroken)
            found += rescued
            for task in rescued:
                logger.warning(
                    "Task %d (%r) was taken back from worker %s, which is dead; it is %s now.",
                    task.id,
                    task.task_path,
                    task.worker,
                    task.status,
                )
            if len(rescued) < RESCUED_AT_ONCE:
                break
        delete_dead(self.using, unbroken=unbroken)
        self._rescued = [(task.queue, task.task_path, task.status) for task in found]


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


#: Seconds between two readings, and for which the upkeep reads after the last call of ``request()``.
BETWEEN_READINGS, READ_FOR = 10.0, 600.0


class Readings:
    """The depths of the queues and the counters of attempts. The upkeep reads them while clients request them.

    ``request()`` does not wait. It returns what the upkeep has read last. So it needs no session.
    """

    def __init__(self, using: str) -> None:
        self.using = using
        self._requested_at = self._read_at = -math.inf
        self._depths: Sequence[QueueCounts] = ()
        self._counters: Sequence[Total] = ()

    def request(self) -> tuple[Sequence[QueueCounts], Sequence[Total]]:
        """Return depths and counters; both empty if they are not known."""
        self._requested_at = time.monotonic()
        return (self._depths, self._counters) if self._requested_at - self._read_at < MAX_AGE else ((), ())

    @property
    def is_requested(self) -> bool:
        """Whether a client has requested the numbers lately."""
        return time.monotonic() - self._requested_at < READ_FOR

    def run_if_due(self) -> None:
        """Read the numbers if they are due and requested. A queue that has become empty stays, with zeros."""
        now = time.monotonic()
        if self.is_requested and now - self._read_at >= BETWEEN_READINGS:
            found = {each.queue: each for each in depths(self.using)}
            empty = dict.fromkeys(COUNTED, 0)
            gone = [QueueCounts.of(each.queue, empty, None, None) for each in self._depths if each.queue not in found]
            self._depths, self._counters = [*found.values(), *gone], counters(self.using)
            self._read_at = now


#: Seconds between two checks, and before the first one. By then, workers that start together have written which
#: functions they know.
CHECK_INTERVAL = 30.0


class UnknownReport:
    """Warns once about each function and queue, and again after its tasks were gone. Only the oldest parent checks."""

    def __init__(self, using: str) -> None:
        self.using = using
        self._checked_at = time.monotonic()
        self._reported: set[str] = set()
        self._reported_queues: set[str] = set()

    def run_if_due(self) -> None:
        """Check for such tasks, if this is due."""
        if time.monotonic() - self._checked_at < CHECK_INTERVAL:
            return
        self._checked_at = time.monotonic()
        self._report(unknown(self.using))
        self._report_queues(set(unserved_queues(self.using)))

    def _report(self, found: list[UnknownTasks]) -> None:
        for each in found:
            if each.task_path not in self._reported:
                self._reported.add(each.task_path)
                logger.warning(
                    "%s of queue %r %s %r, which no running worker has imported. "
                    "Import its module in the workers, or deploy the version that defines it.",
                    "1 task" if each.waiting == 1 else f"{each.waiting} tasks",
                    each.queue,
                    "calls" if each.waiting == 1 else "call",
                    each.task_path,
                )
        self._reported &= {each.task_path for each in found}

    def _report_queues(self, found: set[str]) -> None:
        for queue in sorted(found - self._reported_queues):
            logger.warning(
                "Tasks wait in the queue %r, which no running worker serves. Start a worker for it, or move them: "
                "manage.py locktasks move-to-queue --queue %s --to OTHER",
                queue,
                queue,
            )
        self._reported_queues = found
