"""The upkeep: promote tasks that are due, enqueue scheduled tasks, rescue tasks of dead workers, prune and archive.

Every worker runs this service, and one at a time does the work: each round is a transaction that begins with an attempt
to take an advisory lock. Correctness does not depend on the lock; it only saves work. A worker that is frozen in the
middle of its round would block the rounds of the others, so the server ends the session of a round that stands still.

The oldest workers are on duty: they do a round nearly every heartbeat interval. All others do a round rarely, in case
those on duty do not. The answer to each heartbeat tells a worker whether it is on duty, and then it begins at once. The
oldest worker also searches for ready tasks of which no sleeping worker was notified, so that the others need not.

Schedules are served outside of the round, by every worker for the functions that it knows: each tick is a transaction
of its own that only one worker can win, and a tick that fails does not affect the others.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from django.db import transaction

from django_pglock.conf import get_settings
from django_pglock.postgres.connections import connection_for, has_session_ended, is_read_only
from django_pglock.store import schedule_register, schedule_rows, schedule_tick
from django_pglock.store.admit import admit
from django_pglock.store.history import add_rescued, prune_history
from django_pglock.store.liveness import UPKEEP_WORKERS, WITNESS_AFTER, delete_dead
from django_pglock.store.lock_keys import KEYS_AT_ONCE, blocked_keys
from django_pglock.store.promote import next_due_in, promote
from django_pglock.store.prune import ages_of, prune_window, warn_of_references
from django_pglock.store.rate import delete_unused_rates, open_rates
from django_pglock.store.ready import ready_queues
from django_pglock.store.release import WAITERS_AT_ONCE, orphaned_waiters, release
from django_pglock.store.rescue import RESCUED_AT_ONCE, Rescued, rescue
from django_pglock.store.upkeep_turn import try_upkeep_lock
from django_pglock.store.wake import wake
from django_pglock.worker.service import ConnectedService, logger
from django_pglock.worker.upkeep.archive_keeping import ArchiveKeeping
from django_pglock.worker.upkeep.queue_counts import QueueCounts
from django_pglock.worker.upkeep.unknown_report import UnknownReport

if TYPE_CHECKING:
    from django_pglock.tasks.schedules import Timing
    from django_pglock.worker.shared_sessions import SharedSessions

T = TypeVar("T")

#: Seconds between two rounds, as a share of the heartbeat interval. With two missing beats before, the tasks of a
#: killed worker run elsewhere within ten seconds at default settings.
ROUND = 0.9
#: A worker that is not on duty multiplies the time between two rounds, and between two prunings, by this factor.
STANDBY_FACTOR = 10
#: A resting worker multiplies them by this factor as well: at least eight workers do a round more often.
RESTING_FACTOR = 3
#: Seconds between two searches for tasks whose notification was lost, as a share of the poll interval. The next round
#: after that searches.
UNNOTICED = 0.8
#: How many times one round queries for tasks of dead workers, while each query returns as many as it can take.
RESCUES = 5
#: Tasks that one round reads to prune them, and seconds until the next round when no old task is left.
PRUNED_AT_ONCE, PRUNING_PAUSE = 5000, 60.0
#: Seconds before due tasks whose rows are locked are tried again; doubled each time, up to the second number.
FIRST_LOCKED_RETRY, LONGEST_LOCKED_RETRY = 0.01, 1.0


class Upkeep(ConnectedService):
    """Rounds of upkeep. ``promoted`` is called when tasks have become ready."""

    name = "upkeep"

    def __init__(
        self, using: str, worker: UUID, promoted: Callable[[], None], sessions: SharedSessions | None = None
    ) -> None:
        super().__init__(using, sessions)
        self.promoted = promoted
        self._registered: dict[str, Timing] = {}
        # How many older workers do the upkeep.
        self._older_workers = 0
        #: Whether enough older workers beat often, so that this one does not.
        self.is_resting: Callable[[], bool] = lambda: False
        self._searched_unnoticed_at = time.monotonic()
        self._wakeup = threading.Event()
        self.unknown = UnknownReport(using, worker)
        self.queue_counts = QueueCounts(using)
        self.archive = ArchiveKeeping(using)
        self._rescued_at = self._rescue_from = 0.0
        # When this turn began, and when the first of several turns in a row began that were another worker's.
        self._began_at = self._kept_out_since = 0.0
        # Where the last queries for stray keys, for stray waiters and for unused buckets ended.
        self._key, self._waiter, self._rate_key = "", 0, ""
        # The task id up to which pruning has come, and when it continues.
        self._pruned_to, self._prune_at = 0, 0.0
        # Tables of the project that are known to keep tasks from being pruned.
        self._referring: set[str] = set()
        # What this round has rescued: queue, function and new status.
        self._rescued: list[tuple[str, str, str]] = []
        # Names of the steps that failed when they were tried last.
        self._failing: set[str] = set()
        # Seconds for which due tasks whose rows are locked are not promoted.
        self._left_alone = 0.0

    def _look_for_delay(self) -> None:
        """Postpone the rescue if this turn was delayed, for example by a lock on the table: others were delayed, too.

        Shorter delays are too short for a living worker to look dead. A worker without tasks, which such a lock does
        not delay, may count as the witness that lets rescue treat others as dead.
        """
        if time.monotonic() - self._began_at > get_settings().HEARTBEAT_LIMIT / 3:
            self._rescue_from = time.monotonic() + get_settings().HEARTBEAT_INTERVAL * WITNESS_AFTER

    def wake(self) -> None:
        """Do a turn now: a task may be due sooner than the present sleep ends."""
        self._wakeup.set()

    def set_older_workers(self, older_workers: int) -> None:
        """Take note of how many older workers do the upkeep. If this worker comes on duty, it begins at once."""
        before, self._older_workers = self._older_workers, older_workers
        if older_workers < UPKEEP_WORKERS <= before:
            self.wake()

    @property
    def _between_rounds(self) -> float:
        """Seconds between two rounds, if nothing is due before. Off duty they vary, so that the rounds spread."""
        often = get_settings().HEARTBEAT_INTERVAL * ROUND
        if self._older_workers < UPKEEP_WORKERS or self.queue_counts.is_requested:
            return often
        return often * self._interval_factor * random.uniform(0.8, 1.2)  # noqa: S311

    @property
    def _interval_factor(self) -> int:
        """How many times more rarely than a worker on duty this one works."""
        if self._older_workers < UPKEEP_WORKERS:
            return 1
        return STANDBY_FACTOR * RESTING_FACTOR if self.is_resting() else STANDBY_FACTOR

    def turn(self) -> None:
        self._wakeup.clear()
        self._began_at = time.monotonic()
        interval_factor = self._interval_factor
        waits = (
            self._between_rounds,
            self._attempt(self._round),
            self._attempt(self._keep_schedules),
            self._attempt(self.archive.run_if_due, interval_factor),
        )
        self._attempt(self.queue_counts.run_if_due, interval_factor)
        self._look_for_delay()
        sleep = max(0.0, min(seconds for seconds in waits if seconds is not None))
        self.note_life(sleep)
        self.release_session()
        self._wakeup.wait(sleep)

    def _round(self) -> float | None:
        """Do one round; return the seconds until the next task is due, None if that is not known."""
        self._rescued = []
        with transaction.atomic(using=self.using, durable=True):
            if not try_upkeep_lock(self.using):
                self._kept_out_since = self._kept_out_since or self._began_at
                return None
            # The worker that kept us out for so long was delayed, and so may have been all others.
            self._began_at, self._kept_out_since = self._kept_out_since or self._began_at, 0.0
            promoted = self._attempt(promote, self.using) or 0
            keys, awaited = self._attempt(open_rates, self.using) or [], []
            has_moved = bool(promoted or keys)
            if time.monotonic() - self._rescued_at >= get_settings().HEARTBEAT_INTERVAL * ROUND:
                self._rescued_at = time.monotonic()
                # This transaction has a lock on the tasks' table by now: nobody can lock it out any more.
                self._look_for_delay()
                if time.monotonic() >= self._rescue_from:
                    self._attempt(self._rescue)
                keys += self._attempt(self._orphaned_keys) or []
                awaited = self._attempt(self._orphaned_waiters) or []
            self._attempt(self._wake_for_unnoticed)
            due_in = self._attempt(next_due_in, self.using)
        # Outside of the round's transaction, because the rows of the history are locked by all workers in turn.
        self._attempt(add_rescued, self.using, self._rescued)
        # This, too, because admission holds the locks of the keys to the end of a transaction.
        if keys or awaited:
            promoted += self._attempt(release, self.using, awaited) or 0
            promoted += self._attempt(admit, self.using, keys) or 0
            due_in = self._attempt(next_due_in, self.using)
        if promoted:
            self.promoted()
        if not self._older_workers:
            self._attempt(self.unknown.run_if_due)
        if time.monotonic() >= self._prune_at:
            self._attempt(self._prune)
        return self._pause(due_in, has_moved=has_moved or promoted > 0)

    def _wake_for_unnoticed(self) -> None:
        """Notify sleeping workers of ready tasks, if it is time to: who enqueued them may have died before that.

        Only the oldest worker does. Those that can run none of these tasks are woken as well.
        """
        now = time.monotonic()
        if self._older_workers or now - self._searched_unnoticed_at < get_settings().POLL_INTERVAL * UNNOTICED:
            return
        self._searched_unnoticed_at = now
        wake(self.using, ready_queues(self.using))

    def _attempt(self, step: Callable[..., T], *values: Any) -> T | None:
        """Return what a step returns, None if it fails. A failure affects no other step while the session lives."""
        name, connection = step.__qualname__, connection_for(self.using)
        session = connection.connection
        try:
            with transaction.atomic(using=self.using) if connection.in_atomic_block else nullcontext():
                answer = step(*values)
        except Exception as error:
            # Django drops a session that broke within a transaction and would open another without our settings. A
            # session that may only read leads to a server that is not the primary (any more): the next session may lead
            # there.
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
        """Return ``due_in``, or longer when something is due and could not be moved, because its row is locked."""
        if has_moved or due_in is None or due_in > 0:
            self._left_alone = 0.0
            return due_in
        self._left_alone = min(LONGEST_LOCKED_RETRY, 2 * self._left_alone or FIRST_LOCKED_RETRY)
        return self._left_alone

    def _keep_schedules(self) -> float | None:
        """Enqueue the ticks that are due; return the seconds until the next tick, None if there is none."""
        timings = schedule_rows.timings(self.using)
        if timings != self._registered:
            schedule_register.register(self.using)
            self._registered = timings
        if not timings:
            return None
        ticks = schedule_tick.enqueue_due(self.using)
        if ticks.tasks:
            self.promoted()
        return ticks.next_in

    # Keys and waiters that a crash has left blocked, some at a time

    def _orphaned_keys(self) -> list[str]:
        keys = blocked_keys(self.using, self._key)
        self._key = keys[-1] if len(keys) == KEYS_AT_ONCE else ""
        return keys

    def _orphaned_waiters(self) -> list[int]:
        waiters = orphaned_waiters(self.using, self._waiter)
        self._waiter = waiters[-1][0] if len(waiters) == WAITERS_AT_ONCE else 0
        return [awaited for _, awaited in waiters if awaited is not None]

    def _prune(self) -> None:
        """Delete some old tasks. Outside of the round's transaction: two workers may do it at once without harm."""
        rest = PRUNING_PAUSE * self._interval_factor
        if not self._pruned_to:
            warn_of_references(self.using, self._referring)
        count, self._pruned_to = prune_window(self.using, self._pruned_to, ages_of(), batch=PRUNED_AT_ONCE)
        forgotten = self._attempt(prune_history, self.using)
        unused, self._rate_key = delete_unused_rates(self.using, self._rate_key)
        if unused or count or self._pruned_to or forgotten:
            rest = get_settings().HEARTBEAT_INTERVAL * ROUND
        self._prune_at = time.monotonic() + rest

    def _rescue(self) -> None:
        found: list[Rescued] = []
        for _ in range(RESCUES):
            rescued = rescue(self.using)
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
        delete_dead(self.using)
        self._rescued = [(task.queue, task.task_path, task.status) for task in found]
