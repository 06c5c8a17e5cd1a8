"""The fetcher: claims as many tasks as the threads can use soon, and sleeps while there are none."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from uuid import UUID

from django.db import transaction

from django_pglock.conf import get_settings
from django_pglock.store.admit import admit, blocked_keys
from django_pglock.store.liveness import LATE, silent_after, try_upkeep_lock
from django_pglock.store.ready import next_due_in, ready_paths
from django_pglock.store.release import promote
from django_pglock.store.settle import give_back, server_time
from django_pglock.store.statements import keeps_plans
from django_pglock.store.wake import NEGATIVE_TTL
from django_pglock.tasks import registry
from django_pglock.tasks.registry import import_function
from django_pglock.worker.child.claimer import EMPTY_PAUSE, Claimer, FunctionKind
from django_pglock.worker.child.drain import Drain
from django_pglock.worker.child.exclusive_run import ExclusiveRun
from django_pglock.worker.child.in_flight import InFlight
from django_pglock.worker.child.sleep import Sleep
from django_pglock.worker.queues import Queues
from django_pglock.worker.service import Service, logger

if TYPE_CHECKING:
    from django_pglock.tasks.claim import Claim

#: Seconds for which the fetcher of an idle worker waits after a claim. Python runs one thread at a time. Without the
#: wait, the task would begin only after the fetcher has prepared its next poll.
PAUSE_AFTER_CLAIM = 0.00005
#: Seconds after which claims that no thread has begun are given back if they are not expected to begin soon.
LONGEST_WAIT = 0.2
#: Seconds between two polls of a draining worker that waits for its tasks in flight.
DRAINING = 0.1
#: Seconds of uninterrupted work after which the worker unsets ``is_sleeping``, because it needs no notifications.
BUSY = 0.1
#: Seconds between two checks of an exclusive run.
CHECK_INTERVAL = 0.05
#: While notifications are certain to arrive, a worker multiplies its poll interval by this factor.
LISTENING_FACTOR = 6


class ParentsHeartbeat:
    """What this child knows of the heartbeats that its parent writes for it. The main thread writes the attributes."""

    def __init__(self) -> None:
        #: When the last heartbeat was begun that was written, by time.monotonic(); None: there was none.
        self.beat_at: float | None = None
        #: Whether the parent has a session, and whether it receives notifications.
        self.is_connected = self.is_listening = False

    def is_alive(self) -> bool:
        """Return whether others count this worker as alive, so that it may claim tasks."""
        if self.beat_at is None:
            return False
        age = time.monotonic() - self.beat_at
        return age <= silent_after() and (self.is_connected or age <= 2 * get_settings().HEARTBEAT_INTERVAL)

    def is_notified(self) -> bool:
        """Return whether notifications are sure to reach this worker."""
        if self.beat_at is None or not self.is_listening:
            return False
        return time.monotonic() - self.beat_at < LATE * get_settings().HEARTBEAT_INTERVAL


class Fetcher(Service):
    """Fills the inboxes with tasks of the served queues, of one ``backend`` or, if it is None, of all backends.

    ``drain`` is finished when nothing is in flight and no task is left that could be claimed. None: the worker does not
    drain. ``on_task_limit`` is called when the process has claimed its maximum number of tasks.
    """

    name = "fetcher"
    keeps_plans = True

    def __init__(
        self,
        in_flight: InFlight,
        using: str,
        worker: UUID,
        queues: Queues,
        *,
        sleep: Sleep,
        heartbeat: ParentsHeartbeat,
        backend: str | None = None,
        drain: Drain | None = None,
        on_task_limit: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(using)
        self.on_task_limit = on_task_limit
        self.heartbeat = heartbeat
        self.drain = drain
        self.in_flight = in_flight
        self.worker = worker
        self.queues = queues
        self.sleep = sleep
        self.claimer = Claimer(in_flight, using, worker, queues, backend=backend)
        self._discovery = Discovery(using, queues)
        # Whether the present poll follows a notification.
        self._was_notified = False
        self._busy_since: float | None = None
        # Whether the last poll has shown that only queues named by later notifications can have ready tasks.
        self._are_others_empty = False
        # When the fetcher last read the free capacity, and when it last claimed a task.
        self._polled_at = self._found_at = 0.0
        # A draining worker must not postpone a suspect, because it would leave the task behind.
        self._exclusive_run = ExclusiveRun(in_flight, may_postpone=drain is None)
        # How many claims had ended, and when that number last changed.
        self._ended = -1
        self._progressed_at = 0.0
        self.comparison = ClaimComparison(in_flight, using, worker)
        #: Whether the fetcher has polled for tasks in its present session.
        self.is_claiming = False

    def wake(self) -> None:
        self.in_flight.fetcher_wakeup.set()

    def flush(self) -> None:
        # Perhaps no other worker was notified of what this one was notified of.
        if self.is_connected:
            self.sleep.end()
            self.sleep.wake_others()

    def finish(self) -> None:
        self._exclusive_run.end()

    def forbidden(self, error: BaseException) -> None:
        if self.drain is not None:
            self.drain.give_up(error)

    def connected(self) -> None:
        # A new session may find another row: this worker has to ask for notifications again.
        self.sleep.since = None
        # The answer to the last claim may have been lost with the previous session. By the table, such a task belongs
        # to this worker, but it is not in flight here. It would stay RUNNING as long as this worker lives.
        if self.reconnects:
            self.in_flight.answer_lost_at = time.monotonic()
        # A thread may be claiming for its group at this moment. The order of these lines matters. ``before`` excludes
        # claims that are made after it was read. The key of an earlier claim stays in ``claiming_groups`` until the
        # claim is in flight. So ``group_keys`` has its key, or ``known`` has the claim.
        before, group_keys = server_time(self.using), self.in_flight.group_keys_being_claimed()
        known = self.in_flight.task_ids()
        lost = give_back(self.using, self.worker, known, before=before, except_keys=group_keys)
        if lost:
            logger.warning("Gave back %d tasks because the answer to their claim was late.", lost)

    def close(self) -> None:
        self.is_claiming = False
        super().close()

    def run_once(self) -> None:
        # Cleared before the poll. If it is set from now on, there may be tasks that this poll does not find.
        self.in_flight.fetcher_wakeup.clear()
        self._give_back_late()
        self.comparison.compare_if_due()
        if self._exclusive_run.advance():
            self._wait(CHECK_INTERVAL)
            return
        if not self._may_claim():
            self._wake_others_without_capacity()
            self._wait(LONGEST_WAIT)
            return
        # Before the claim, because a task that becomes ready after this check does not belong to the drain.
        is_last_poll = self.drain is not None and self._promote_for_drain()
        capacities = self._prepare_poll(is_last_poll=is_last_poll)
        if not capacities:
            self._wake_others_without_capacity()
            self._pause(LONGEST_WAIT)
        elif self._claim_and_begin(capacities):
            self._end_sleep_when_busy()
            self._wake_others_after_claim(capacities)
            if self.in_flight.claims_left == 0:
                self.on_task_limit()
        elif self._has_new_functions():
            # Tasks were ready whose functions this process did not know. It knows them now, and claims them in the
            # next pass.
            self.claimer.note_new_functions()
        elif self.drain is not None:
            # A thread may still be busy although its outcome is settled. Then this poll has left out sync functions.
            if is_last_poll and not self.claimer.leaves_out_a_kind(capacities):
                self.drain.finish()
            self._pause(DRAINING)
        elif self._leaves_tasks_to_others(capacities) and time.monotonic() - self._found_at < BUSY:
            # The other kind of functions keeps the worker busy, so it does not sleep and needs no notifications.
            self._pause(EMPTY_PAUSE)
        else:
            self._busy_since = None
            self._sleep()

    def _may_claim(self) -> bool:
        """Return whether the worker may claim tasks now, regardless of free threads."""
        # Other workers would rescue tasks that a worker with a stale heartbeat claims, while the tasks run here.
        return self.in_flight.may_claim() and self.heartbeat.is_alive()

    def _prepare_poll(self, *, is_last_poll: bool) -> list[tuple[FunctionKind, int]]:
        """Note new functions and new tasks. Return the kinds of functions to claim, and how many tasks of each."""
        if self._discovery.is_due:
            self._discovery.check()
        self._was_notified = self.sleep.is_notified
        if self.in_flight.has_new_tasks:
            self.in_flight.has_new_tasks = False
            self.claimer.pauses.note_new_tasks()
        if is_last_poll:
            # The last poll must leave out no kind that has capacity.
            self.claimer.was_full = False
        self._polled_at = time.monotonic()
        return self.claimer.free_capacities()

    def _claim_and_begin(self, capacities: list[tuple[FunctionKind, int]]) -> bool:
        """Claim tasks and pass them to the threads and the event loop. Return whether there were any."""
        if claims := self._claim(capacities):
            # This counts as progress. If the answer was slow, the threads have waited for these claims.
            self._progressed_at = self._found_at = time.monotonic()
            self.in_flight.begin_all(self._exclusive_run.hold_back_suspects(claims))
            if self._busy_since is None:
                time.sleep(PAUSE_AFTER_CLAIM)
        return bool(claims)

    def _claim(self, capacities: list[tuple[FunctionKind, int]]) -> list[Claim]:
        notified = self.sleep.take_notified()
        claims = self.claimer.claim(capacities, notified=notified if self._are_others_empty else ())
        # A task may have been ready before this worker asked for notifications, also a task of a kind of functions
        # that had no capacity.
        is_complete = self._polled_at >= self._second_poll_at and not self.claimer.leaves_out_a_kind(capacities)
        self._are_others_empty = is_complete and not claims
        self.is_claiming = True
        return claims

    def _wake_others_after_claim(self, capacities: list[tuple[FunctionKind, int]]) -> None:
        """After a claim that follows a notification, wake the other workers if there may be more tasks."""
        was_full = self.claimer.was_full or self.claimer.has_left_queues
        if was_full or self.claimer.leaves_out_a_kind(capacities):
            self.sleep.wake_others()
        else:
            self.sleep.note_all_claimed()

    def _leaves_tasks_to_others(self, capacities: list[tuple[FunctionKind, int]]) -> bool:
        """Return whether a poll that found nothing has left out a kind of functions. If so, wake the other workers."""
        if self.claimer.leaves_out_a_kind(capacities):
            self.sleep.wake_others(has_claimed=False)
            return True
        if self.claimer.was_ready and self._discovery.has_unknown:
            # This process does not know all functions, as during a deployment. Otherwise another one has the task.
            self.sleep.wake_others(has_claimed=False)
        self.sleep.note_all_claimed()
        return False

    def _wake_others_without_capacity(self) -> None:
        """If a notification came while there is no capacity, wake the other workers, and unset ``is_sleeping``."""
        if self.sleep.has_unclaimed:
            self.sleep.wake_others()
            self.sleep.end()

    def _has_new_functions(self) -> bool:
        is_urgent = self._was_notified or self.drain is not None
        return self.claimer.was_ready and self._discovery.check(is_urgent=is_urgent)

    def _give_back_late(self) -> None:
        """Give back the waiting claims if the tasks before them take longer than expected when they were claimed."""
        now, threads = time.monotonic(), self.in_flight.threads
        if (ended := threads.ended) != self._ended or threads.waiting == 0:
            self._ended, self._progressed_at = ended, now
        if threads.longest_wait() < LONGEST_WAIT:
            return
        blocked_for = now - self._progressed_at
        if blocked_for >= LONGEST_WAIT:
            # No task has ended. A task that has run for so long is expected to run for as long again.
            threads.expect_cost(2 * blocked_for)
            self.in_flight.give_back_waiting()
        elif threads.expected_wait() >= LONGEST_WAIT:
            # Short tasks came before long ones, and the first long ones have ended.
            self.in_flight.give_back_waiting()

    def _promote_for_drain(self) -> bool:
        """Promote due tasks, and admit to lock keys. Return whether nothing is in flight and no task was due."""
        assert self.drain is not None  # noqa: S101 - for the type checker
        if self.in_flight.claims or self.drain.waits_for_rescue():
            return False
        due_in = next_due_in(self.using)
        if due_in is not None and due_in <= 0:
            with transaction.atomic(using=self.using):
                # Not beside a round of upkeep: each would skip what the other has locked, and the younger of two tasks
                # of a lock key could be admitted first.
                if try_upkeep_lock(self.using):
                    promote(self.using)
            return False
        # Another worker may have promoted tasks, and not yet admitted the first task of each key.
        admit(self.using, blocked_keys(self.using, ""))
        return True

    def _pause(self, seconds: float) -> None:
        """Sleep until ``fetcher_wakeup`` is set or a thread is nearly free; less while claims wait, to check them.

        Call it only after a poll in the same pass. Moments that an earlier poll expected may be over, and then the
        fetcher would not sleep at all.
        """
        seconds = min(seconds, LONGEST_WAIT) if self.in_flight.waiting else seconds
        self._wait(
            min(
                seconds,
                self.in_flight.threads.next_change_in(self._polled_at),
                *map(self.claimer.pauses.next_in, self.claimer.paused_kinds),
            )
        )

    def _pause_until_news(self, seconds: float) -> None:
        """Sleep for up to ``seconds``, until tasks may be ready that were not ready at the last poll.

        If this worker is notified of each new task, a thread that becomes free is no reason to poll at once: the last
        poll had capacity, and has shown that nothing was ready. But it is a reason to poll a moment after that poll.
        There are tasks without a notification: a trigger enqueues in a transaction that commits much later, the lock of
        a row that a poll has skipped ends, or a running task imports the function of a ready one.
        """
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self.in_flight.waiting or not (self._are_others_empty and self.heartbeat.is_notified()):
                self._pause(left)
                return
            self._wait(left)
            # Clear the event before reading ``has_new_tasks``, because other threads set ``has_new_tasks`` first.
            self.in_flight.fetcher_wakeup.clear()
            if self.in_flight.has_new_tasks or self.stopping.is_set():
                return
            until = min(until, self._polled_at + EMPTY_PAUSE)

    def _wait(self, seconds: float) -> None:
        """Sleep until ``fetcher_wakeup`` is set, for up to ``seconds``."""
        self.report_alive(seconds)
        self.in_flight.fetcher_wakeup.wait(seconds)

    # Sleep

    def _sleep(self) -> None:
        """Set ``is_sleeping``, then poll twice (``store/wake.py`` says why), then sleep until the next poll."""
        # Also while the session that listens is lost or late: its next one comes before the next poll. Behind a pooler,
        # where no session keeps plans, no notification will ever come.
        if self.sleep.since is None and keeps_plans(self.using):
            self.sleep.begin()
            # The next poll must leave out no kind, because this worker was not notified of earlier tasks.
            self.claimer.pauses.note_new_tasks()
            return
        if self.sleep.since is not None and self._polled_at < self._second_poll_at:
            self._pause(max(0.0, self._second_poll_at - time.monotonic()))
        else:
            self._sleep_until_poll()

    @property
    def _second_poll_at(self) -> float:
        """The moment from which on other processes notify this worker of each new task.

        Infinite: other processes notify this worker of no task.

        A poll that begins later finds the tasks that came before. A poll that only ends later may miss some of them.
        """
        since = self.sleep.since
        return math.inf if since is None else since + NEGATIVE_TTL * 1.2

    def _sleep_until_poll(self) -> None:
        """Sleep for one poll interval, or for several while notifications are certain to arrive.

        The oldest worker searches for tasks with a lost notification (``upkeep.py``), so they do not wait longer.
        """
        poll = random.uniform(0.8, 1.2) * get_settings().POLL_INTERVAL  # noqa: S311
        for _ in range(LISTENING_FACTOR):
            until = time.monotonic() + poll
            # If this pass did not import a function because the last check was less than a second ago, no second
            # notification comes for its task.
            self._pause_until_news(min(poll, self._discovery.next_in) if self.claimer.was_ready else poll)
            has_news = time.monotonic() < until or self.in_flight.claims or self.comparison.is_due
            if has_news or not self.heartbeat.is_notified():
                return

    def _end_sleep_when_busy(self) -> None:
        now = time.monotonic()
        self._busy_since = self._busy_since or now
        if now - self._busy_since > BUSY:
            self.sleep.end()


#: Seconds between two checks while tasks are ready that this process cannot claim, and while it has other work.
SEARCH_INTERVAL, BUSY_SEARCH_INTERVAL = 1.0, 30.0


class Discovery:
    """Imports the modules that ready tasks of the served queues name, if ``tasks/registry.py`` allows them."""

    def __init__(self, using: str, queues: Queues) -> None:
        self.using = using
        self.queues = queues
        self._checked_at = float("-inf")
        # Whether a check was refused because the previous one was just before.
        self._is_owed = False
        #: Whether the last check has found tasks whose functions this process does not know.
        self.has_unknown = False

    @property
    def is_due(self) -> bool:
        """Whether it is time to check although there is other work."""
        return time.monotonic() - self._checked_at >= BUSY_SEARCH_INTERVAL

    @property
    def next_in(self) -> float:
        """Seconds until the check that was refused; infinity: none was."""
        return max(0.0, self._checked_at + SEARCH_INTERVAL - time.monotonic()) if self._is_owed else math.inf

    def check(self, *, is_urgent: bool = False) -> bool:
        """Check, unless the last check was less than ``SEARCH_INTERVAL`` ago. Return whether functions were found.

        With ``is_urgent``, check in any case.
        """
        self._is_owed = not is_urgent and time.monotonic() - self._checked_at < SEARCH_INTERVAL
        if self._is_owed:
            return False
        self._checked_at = time.monotonic()
        served = {path for queue, path in ready_paths(self.using) if self.queues.serves(queue)}
        unknown = [path for path in sorted(served) if registry.find(path) is None]
        found = [path for path in unknown if import_function(path)]
        self.has_unknown = len(found) < len(unknown)
        return bool(found)


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
        if now - self._compared_at < limit:
            return False
        return (
            self._had_claims
            or bool(self.in_flight.claims)
            or self.in_flight.claimed != self._claimed
            or now - self.in_flight.answer_lost_at < CERTAIN_AFTER * limit
        )

    def compare_if_due(self) -> None:
        """Give back old claims of this worker that are not in flight."""
        if not self.is_due:
            return
        # This process may freeze between the list and the statement, and claims that it makes meanwhile are not in the
        # list. A claim of a group may wait for a lock for longer than the limit, and its date is that of its message.
        # The order matters: claims that begin after the first line are excluded by their date.
        before, group_keys = server_time(self.using), self.in_flight.group_keys_being_claimed()
        self._compared_at = time.monotonic()
        self._claimed, self._had_claims = self.in_flight.claimed, bool(self.in_flight.claims)
        known, limit = self.in_flight.task_ids(), get_settings().HEARTBEAT_LIMIT
        lost = give_back(self.using, self.worker, known, older_than=limit, before=before, except_keys=group_keys)
        if lost:
            logger.warning("Gave back %d tasks that were claimed for this worker and never reached it.", lost)
