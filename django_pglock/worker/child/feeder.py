"""The feeder: claims as many tasks as the threads can use soon, and sleeps while there are none."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from django_pglock.conf import get_settings
from django_pglock.error_reading import one_line
from django_pglock.store.admit import admit, blocked_keys
from django_pglock.store.liveness import LATE, silent_after
from django_pglock.store.ready import next_due_in, paused_queues, unknown
from django_pglock.store.release import promote
from django_pglock.store.rescue import possibly_lost
from django_pglock.store.settle import give_back, server_time
from django_pglock.store.statements import keeps_plans
from django_pglock.store.wake import MOST_HOPS, NEGATIVE_TTL, wake_others, write_sleep_flag
from django_pglock.tasks import registry
from django_pglock.worker.child.claimer import (
    ALL,
    ASYNC,
    SYNC,
    Claimer,
    FunctionKind,
)
from django_pglock.worker.child.in_flight import LONGEST_WAIT, InFlight
from django_pglock.worker.service import Service, logger

if TYPE_CHECKING:
    from django_pglock.tasks.claim import Claim


#: Seconds for which the feeder of an idle worker waits after a claim. Python runs one thread at a time. Without the
#: wait, the task would begin only after the feeder has prepared its next poll.
PAUSE_AFTER_CLAIM = 0.00005
#: Seconds between two polls of a draining worker that waits for its tasks in flight.
DRAINING = 0.1
#: Seconds of uninterrupted work after which the worker unsets ``is_sleeping``, because it needs no notifications.
BUSY = 0.1
#: Seconds to the next poll if one kind of functions keeps the worker busy, and nothing was ready of the other kind.
EMPTY_PAUSE = 0.05
#: Seconds between two checks of an exclusive run.
CHECK_INTERVAL = 0.05
#: Seconds between two searches while tasks are ready that this process cannot claim, and while it has other work.
SEARCH_INTERVAL, BUSY_SEARCH_INTERVAL = 1.0, 30.0
#: While notifications are certain to arrive, a worker multiplies its poll interval by this factor.
LISTENING_FACTOR = 6
#: The pause after a claim for only one kind of functions, as a multiple of the time that the claim took: if it found
#: nothing, and if it found async tasks.
EMPTY_PAUSE_FACTOR, ASYNC_PAUSE_FACTOR = 20, 4
#: After this multiple of HEARTBEAT_LIMIT, a claim whose answer was lost either is committed or will never be, and the
#: claims have been compared with the table since then.
CERTAIN_AFTER = 3.0


class ParentsHeartbeat:
    """What this child knows of the heartbeats that its parent writes for it. The main thread writes the attributes."""

    def __init__(self) -> None:
        #: When the last heartbeat was begun that was written, by time.monotonic().
        self.beat_at = -inf
        #: Whether the parent has a session, and whether it receives notifications.
        self.is_connected = self.is_listening = False

    def is_alive(self) -> bool:
        """Return whether others count this worker as alive, so that it may claim tasks."""
        age = time.monotonic() - self.beat_at
        return age <= silent_after() and (self.is_connected or age <= 2 * get_settings().HEARTBEAT_INTERVAL)

    def is_notified(self) -> bool:
        """Return whether notifications are sure to reach this worker."""
        return self.is_listening and time.monotonic() - self.beat_at < LATE * get_settings().HEARTBEAT_INTERVAL


class Feeder(Service):
    """Fills the inboxes with tasks that the claimer claims.

    One poll makes one claim: for all functions while threads and event loop both have free capacity, otherwise for one
    kind of functions. The index of ready tasks has queues and priorities, but not functions. So a claim for one kind
    reads and skips all tasks of the other kind that come first, and a pause follows in proportion to what it took.

    ``drain`` is finished when nothing is in flight and no task is left that could be claimed. None: the worker does not
    drain.
    """

    name = "feeder"
    keeps_plans = True

    def __init__(
        self,
        in_flight: InFlight,
        claimer: Claimer,
        *,
        heartbeat: ParentsHeartbeat,
        drain: Drain | None = None,
    ) -> None:
        super().__init__(claimer.using)
        self.in_flight = in_flight
        self.claimer = claimer
        self.worker = claimer.worker
        self.heartbeat = heartbeat
        self.drain = drain
        #: Whether the feeder has polled for tasks in its present session.
        self.is_claiming = False
        #: When this worker began to ask for notifications, by time.monotonic(); infinity: it does not.
        self.asked_at = inf
        # Queues in which notifications have said that tasks are ready, and how often they were passed on.
        self._heard: dict[str, int] = {}
        # Whether the last poll has shown that only queues named by later notifications can have ready tasks.
        self._is_rest_empty = False
        # Whether kinds of functions are claimed in turn, because the last claim for all, or for sync ones, was full.
        self._is_split = False
        # Until when a kind of functions is not claimed alone; and when to claim a kind that the last poll has left out
        # although it had free capacity.
        self._paused_until: dict[FunctionKind, float] = {SYNC: 0.0, ASYNC: 0.0}
        self._left_out_until = inf
        # When the feeder last began a poll, when it last claimed a task, and since when it finds some in each poll.
        self._polled_at = self._found_at = 0.0
        self._busy_since: float | None = None
        self._compared_at = time.monotonic()
        # A draining worker must not postpone a suspect, because it would leave the task behind.
        self._exclusive_run = ExclusiveRun(in_flight, may_postpone=drain is None)

    # For other threads

    def note_flag_unset(self) -> None:
        """Note that the row does not say that this worker sleeps: it may have been deleted, and inserted again.

        If this worker sleeps, it sets the flag again, because until then no notification comes.
        """
        if self.asks:
            self.asked_at = inf
            self.in_flight.notify_feeder()

    def wake(self) -> None:
        self.in_flight.feeder_wakeup.set()

    # The service

    def connected(self) -> None:
        # A new session may find another row: this worker has to ask for notifications again.
        self.asked_at, self._is_rest_empty = inf, False
        # The answer to the last claim may have been lost with the previous session. By the table, such a task belongs
        # to this worker, but it is not in flight here. It would stay RUNNING as long as this worker lives.
        if self.reconnects:
            self.in_flight.changed_at = time.monotonic()
        self._give_back_unknown()

    def close(self) -> None:
        self.is_claiming = False
        super().close()

    def flush(self) -> None:
        # Perhaps no other worker was notified of what this one was notified of.
        if self.is_connected:
            self._leave_to_others()

    def finish(self) -> None:
        self._exclusive_run.end()

    def run_once(self) -> None:
        # Cleared before the poll. If it is set from now on, there may be tasks that this poll does not find.
        self.in_flight.feeder_wakeup.clear()
        self.in_flight.is_capacity_wanted, self._left_out_until = True, inf
        if self.in_flight.threads.are_late():
            self.in_flight.give_back_waiting()
        self._compare_if_due()
        if self._exclusive_run.advance():
            self._wait(CHECK_INTERVAL)
            return
        # Other workers would rescue tasks that a worker with a stale heartbeat claims, while the tasks run here.
        may_claim = self.in_flight.may_claim() and self.heartbeat.is_alive()
        # Before the claim, because a task that becomes ready after this check does not belong to the drain.
        is_last_poll = may_claim and self.drain is not None and self.drain.is_last_poll(self.in_flight)
        kind, limit = self._next_claim() if may_claim else (ALL, 0)
        self._hear()
        if not limit:
            if self._heard:
                self._leave_to_others()
            self._wait(LONGEST_WAIT)
        elif claims := self._claim(kind, limit):
            self._begin(claims)
            self._wake_others_if(kind != ALL or self.claimer.has_more)
        else:
            self._find_nothing(kind, is_last_poll=is_last_poll)

    def _find_nothing(self, kind: FunctionKind, *, is_last_poll: bool) -> None:
        if (
            self._must_search
            and self._polled_at - self.claimer.searched_at >= SEARCH_INTERVAL
            and self.claimer.search()
        ):
            # This process knows the functions of the ready tasks now, and claims them in the next pass.
            self._is_rest_empty = False
            return
        # If this process does not know all functions, as during a deployment, another one may have the task.
        is_unknown = self.claimer.was_ready and self.claimer.has_unknown
        self._wake_others_if(kind != ALL or is_unknown, has_claimed=False)
        if self.drain is not None:
            # A thread may still be busy although its outcome is settled. Then this poll has left out sync functions.
            if is_last_poll and kind == ALL and not self._must_search:
                self.drain.finish()
            self._wait(DRAINING)
        elif kind != ALL and time.monotonic() - self._found_at < BUSY:
            # The other kind of functions keeps the worker busy, so it does not sleep and needs no notifications.
            self._wait(EMPTY_PAUSE)
        else:
            self._busy_since = None
            self._sleep()

    # The claim of a poll

    def _next_claim(self) -> tuple[FunctionKind, int]:
        """Return for which functions to claim now, and how many tasks; zero: none."""
        in_flight, now = self.in_flight, time.monotonic()
        capacity_of = {ASYNC: in_flight.coroutines.free_capacity, SYNC: in_flight.threads.free_capacity}
        free = {kind: capacity_of[kind]() for kind in self.claimer.kinds}
        if in_flight.claims_left is not None:
            free = {kind: min(in_flight.claims_left, free[kind]) for kind in free}
        if len(free) == 1 or (all(free.values()) and not self._is_split):
            return ALL, min(free.values())
        # Async functions come first: the pause after each claim for them is the turn of the others.
        kind = next((kind for kind in free if free[kind] and self._paused_until[kind] <= now), ALL)
        left_out = [self._paused_until[other] for other in free if free[other] and other != kind]
        self._left_out_until = min(left_out, default=inf)
        return kind, free.get(kind, 0)

    def _claim(self, kind: FunctionKind, limit: int) -> list[Claim]:
        if time.monotonic() - self.claimer.searched_at >= BUSY_SEARCH_INTERVAL:
            self.claimer.search()
        self._polled_at = time.monotonic()
        claims = self.claimer.claim(kind, limit, notified=self._heard if self._is_rest_empty else ())
        now = time.monotonic()
        if kind != ASYNC:
            self._is_split = self.claimer.has_more
        if kind != ALL:
            # Idle threads are worse than slow claims, so there is no pause while sync tasks are found.
            factor = EMPTY_PAUSE_FACTOR if not claims else ASYNC_PAUSE_FACTOR if kind == ASYNC else 0
            self._paused_until[kind] = now + factor * (now - self._polled_at)
        # A task may have been ready before this worker asked for notifications, also a task of a kind of functions
        # that had no capacity.
        self._is_rest_empty = kind == ALL and not claims and self._polled_at >= self._notified_from
        self.is_claiming = True
        return claims

    def _begin(self, claims: Sequence[Claim]) -> None:
        """Pass claims to the threads and the event loop."""
        self._found_at = time.monotonic()
        self.in_flight.begin_all(self._exclusive_run.hold_back_suspects(claims))
        if self._busy_since is None:
            self._busy_since = self._found_at
            time.sleep(PAUSE_AFTER_CLAIM)
        elif self._found_at - self._busy_since > BUSY:
            self._ask_for_no_more()
        if self.in_flight.claims_left == 0:
            self.in_flight.tell_parent(replace=["it has run its maximum number of tasks"])

    @property
    def _must_search(self) -> bool:
        """Whether tasks were ready that this worker may not claim, and their functions were not searched for since."""
        return self.claimer.was_ready and self.claimer.searched_at < self._polled_at

    # Notifications

    def _hear(self) -> None:
        """Read the news of other threads."""
        while self.in_flight.news:
            if (ready := self.in_flight.news.popleft()) is None:
                self._is_rest_empty = False
            else:
                queue, hops = ready
                self._heard[queue] = hops

    def _wake_others_if(self, is_needed: bool, *, has_claimed: bool = True) -> None:
        """Wake other workers if ready tasks may be left in the queues that notifications have named; forget the queues.

        A worker that ``has_claimed`` nothing may not know the functions. So it wakes others only a few times, or
        workers would wake each other without end.
        """
        heard, self._heard = self._heard, {}
        for hops in {*heard.values()} if is_needed else ():
            if has_claimed or hops < MOST_HOPS:
                queues = [queue for queue in heard if heard[queue] == hops]
                wake_others(self.using, queues, self.worker, hops=0 if has_claimed else hops + 1)

    def _leave_to_others(self) -> None:
        """Wake other workers for what this one was notified of, and ask for no more notifications."""
        self._ask_for_no_more()
        self._hear()
        self._wake_others_if(True)

    def _ask(self) -> None:
        """Ask for notifications. A poll must follow, because no notification comes for tasks that were ready before."""
        write_sleep_flag(self.using, self.worker, is_sleeping=True)
        self.asked_at = time.monotonic()

    def _ask_for_no_more(self) -> None:
        if self.asks:
            write_sleep_flag(self.using, self.worker, is_sleeping=False)
            self.asked_at, self._is_rest_empty = inf, False

    @property
    def asks(self) -> bool:
        """Whether this worker asks for notifications."""
        return self.asked_at < inf

    @property
    def _notified_from(self) -> float:
        """The moment from which on other processes notify this worker of each new task; infinity: they do not.

        A poll that begins later finds the tasks that came before. A poll that only ends later may miss some of them.
        """
        return self.asked_at + NEGATIVE_TTL * 1.2

    # Pauses

    def _sleep(self) -> None:
        """Ask for notifications, then poll twice (``store/wake.py`` says why), then sleep until the next poll."""
        if not self.asks and keeps_plans(self.using):
            # Also while the session that listens is lost or late: its next one comes before the next poll. Behind a
            # pooler, where no session keeps plans, no notification will ever come.
            self._ask()
        elif self._polled_at < self._notified_from < inf:
            self._wait(self._notified_from - time.monotonic())
        else:
            self._wait(self._until_next_poll())

    def _until_next_poll(self) -> float:
        """Return for how many seconds to sleep: longer while notifications are certain to arrive.

        The oldest parent searches for tasks with a lost notification (``heartbeat.py``), so they do not wait longer. It
        also finds tasks without one: a trigger enqueues in a transaction that commits much later, or the lock of a row
        ends that a poll has skipped. So a thread that becomes free is no reason to poll.
        """
        seconds = random.uniform(0.8, 1.2) * get_settings().POLL_INTERVAL  # noqa: S311
        if self.heartbeat.is_notified():
            seconds *= LISTENING_FACTOR
            self.in_flight.is_capacity_wanted = not self._is_rest_empty
        if self._has_uncertain_claims():
            seconds = min(seconds, get_settings().HEARTBEAT_LIMIT)
        # No second notification comes for a task whose function was not searched for, because a search was just before.
        return min(seconds, SEARCH_INTERVAL) if self._must_search else seconds

    def _wait(self, seconds: float) -> None:
        """Sleep until ``feeder_wakeup`` is set; less if claims wait, to check them, or if a kind was left out."""
        if self.in_flight.waiting:
            seconds = min(seconds, LONGEST_WAIT)
        seconds = max(0.0, min(seconds, self._left_out_until - time.monotonic()))
        self.report_alive(seconds)
        self.in_flight.feeder_wakeup.wait(seconds)

    # Claims whose answer was lost

    def _has_uncertain_claims(self) -> bool:
        since = time.monotonic() - self.in_flight.changed_at
        return bool(self.in_flight.claims) or since < CERTAIN_AFTER * get_settings().HEARTBEAT_LIMIT

    def _compare_if_due(self) -> None:
        """Compare this worker's tasks in the table with those in flight, as long as they may differ.

        A claim whose answer was lost may be committed after the feeder, in its next session, has searched for such
        claims. Some seconds later, the claim either is committed or will never be.
        """
        limit = get_settings().HEARTBEAT_LIMIT
        if time.monotonic() - self._compared_at >= limit and self._has_uncertain_claims():
            self._give_back_unknown(older_than=limit)

    def _give_back_unknown(self, *, older_than: float = 0.0) -> None:
        """Give back the tasks of this worker, claimed so many seconds ago, that are not in flight."""
        # This process may freeze between the list and the statement, and threads may be claiming for their groups at
        # this moment. The order of these lines matters. ``before`` excludes claims that are made after it was read. The
        # date of a group's claim may be older, because it has waited for a lock. The key of an earlier claim stays in
        # ``claiming_groups`` until the claim is in flight. So ``group_keys`` has its key, or ``known`` has the claim.
        before, group_keys = server_time(self.using), filter(None, list(self.in_flight.claiming_groups.values()))
        self._compared_at, known = time.monotonic(), self.in_flight.task_ids()
        lost = give_back(self.using, self.worker, known, older_than=older_than, before=before, except_keys=group_keys)
        if lost:
            logger.warning("Gave back %d tasks that were claimed for this worker and never reached it.", lost)


#: Seconds for which a suspect waits until no other task runs. Doubled each time that this is not enough.
WAIT_TIMEOUT = 10.0
#: A suspect is postponed for this multiple of the time for which it has waited. So the threads lose at most one fifth
#: of their time.
POSTPONE_FACTOR = 4


class ExclusiveRun:
    """Gives a task whose workers have died too often one more attempt, as the only task of this process.

    The same applies to a task that ends its session again and again: see ``rescue.py``.

    When a process dies, it is not known which of its tasks was the cause. So each task that was running there counts a
    rescue. A task may end FAILED because of its rescues only after an attempt in which it was the only task of its
    process. The other tasks were not the cause, and they run to their end. With ``MAX_RESCUES=0`` there is no such
    attempt: the first death ends the task.

    Such a task, the suspect, waits until no other task runs in the process. While it waits, no other task begins, but a
    running task may run for hours. So the suspect waits for some seconds. Then it is postponed for several times as
    long, and the process works as usual meanwhile. The next suspect waits twice as long, and so on, until the wait is
    longer than the other tasks run. So the process loses only a fixed share of its time. With ``may_postpone=False`` it
    waits as long as it takes, because the process ends soon.
    """

    def __init__(self, in_flight: InFlight, *, may_postpone: bool = True) -> None:
        self.in_flight = in_flight
        self._first_timeout = WAIT_TIMEOUT if may_postpone else inf
        self._timeout = self._first_timeout
        self._suspect: Claim | None = None
        self._has_begun = False
        self._waits_since = 0.0
        self._none_before = 0.0

    def hold_back_suspects(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Return the claims that may begin now: all, unless one of them is a suspect.

        While suspects are postponed, postpone these as well, and return the others. Otherwise return none: the first
        suspect waits for its exclusive run, and all other claims are given back.
        """
        most = max(1, get_settings().MAX_RESCUES)
        suspects = [claim for claim in claims if claim.rescues >= most]
        if not suspects:
            return claims
        now = time.monotonic()
        if now < self._none_before:
            self.in_flight.add(suspects)
            self.in_flight.abandon(suspects, self._none_before - now)
            return [claim for claim in claims if claim not in suspects]
        suspect = suspects[0]
        text = "%s was rescued %d times. It waits until this worker runs no other task."
        logger.warning(text, suspect, suspect.rescues)
        self._suspect, self._has_begun, self._waits_since = suspect, False, now
        self.in_flight.add(claims)
        for claim in claims:
            if claim is not suspect:
                self.in_flight.give_back(claim)
        self.in_flight.give_back_waiting()
        return ()

    def advance(self) -> bool:
        """Begin the suspect if no other task runs, postpone it if it waits too long. Return whether there is one."""
        suspect = self._suspect
        if suspect is None:
            return False
        if (suspect.id, suspect.attempt) not in self.in_flight.claims:
            self._suspect = None
        elif not self._has_begun and len(self.in_flight.claims) == 1:
            self._has_begun = True
            self._timeout = self._first_timeout
            self.in_flight.begin([suspect])
        elif not self._has_begun and (now := time.monotonic()) - self._waits_since > self._timeout:
            seconds = self._timeout * POSTPONE_FACTOR
            text = "%s waited %.0f s for the other tasks of this worker to end. It is postponed for %.0f s."
            logger.warning(text, suspect, self._timeout, seconds)
            self._suspect, self._none_before, self._timeout = None, now + seconds, self._timeout * 2
            self.in_flight.abandon([suspect], seconds)
        return self._suspect is not None

    def end(self) -> None:
        """Give back a suspect that still waits."""
        if self._suspect is not None and not self._has_begun:
            self.in_flight.give_back(self._suspect)


#: Seconds between two queries for tasks of workers that may be dead.
DEATH_CHECK_INTERVAL = 0.5
#: The number of heartbeat intervals to wait for a rescue beyond HEARTBEAT_LIMIT: another worker must become a witness,
#: and do rounds of upkeep.
RESCUE_MARGIN = 5


@dataclass(eq=False)
class Drain:
    """``--drain``: what a worker waits for before it ends, and what it leaves behind.

    ``claimer`` knows what the worker serves. ``end`` is called when the worker must end. Then ``left_behind`` has, in
    words, the tasks that the worker should have run and that perhaps no worker will run.
    """

    claimer: Claimer
    end: Callable[[], None]
    left_behind: list[str] = field(default_factory=list)
    _waits_since: float | None = None
    _queried_at: float = -DEATH_CHECK_INTERVAL
    _possibly_lost: dict[str, int] = field(default_factory=dict)

    def is_last_poll(self, in_flight: InFlight) -> bool:
        """Promote due tasks, and admit to lock keys. Return whether nothing is in flight and no task was due."""
        if in_flight.claims or self._waits_for_rescue():
            return False
        due_in = next_due_in(self.claimer.using)
        if due_in is not None and due_in <= 0:
            promote(self.claimer.using)
            return False
        # Another worker may have promoted tasks, and not yet admitted the first task of each key.
        admit(self.claimer.using, blocked_keys(self.claimer.using, ""))
        return True

    def _waits_for_rescue(self) -> bool:
        """Return whether tasks run on workers that may be dead. They are rescued soon, or their workers beat again."""
        now = time.monotonic()
        if now - self._queried_at >= DEATH_CHECK_INTERVAL:
            self._queried_at = now
            found = possibly_lost(self.claimer.using, backend=self.claimer.backend)
            self._possibly_lost = {queue: count for queue, count in found if self.claimer.queues.serves(queue)}
        if not self._possibly_lost:
            self._waits_since = None
            return False
        self._waits_since = self._waits_since or now
        settings = get_settings()
        return now - self._waits_since < settings.HEARTBEAT_LIMIT + RESCUE_MARGIN * settings.HEARTBEAT_INTERVAL

    def give_up(self, error: BaseException) -> None:
        """End the worker because its role lacks a right. A cron job must not wait until the right is granted."""
        if not self.left_behind:
            self.left_behind = ["what it may not claim"]
            text = (
                "This worker ends, because its role lacks a right: %s. docs/worker.md#rights-in-the-database lists all."
            )
            logger.error(text, one_line(error))
            self.end()

    def finish(self) -> None:
        """Log what the worker leaves behind, then end it."""
        self.left_behind = [
            f"{_tasks(count)} of queue {queue!r} that {'runs' if count == 1 else 'run'} on a worker that may be dead"
            for queue, count in sorted(self._possibly_lost.items())
        ]
        paused, known = paused_queues(self.claimer.using), registry.known_paths()
        self.left_behind += [
            f"{_tasks(each.waiting)} of queue {each.queue!r} that {'calls' if each.waiting == 1 else 'call'} "
            f"{each.task_path!r}, which this worker does not know"
            for each in unknown(self.claimer.using, worker=self.claimer.worker, backend=self.claimer.backend)
            if self.claimer.queues.serves(each.queue) and each.queue not in paused and each.task_path not in known
        ]
        for what in self.left_behind:
            logger.error("This worker has no more tasks to run. It leaves %s.", what)
        self.end()


def _tasks(count: int) -> str:
    return "1 task" if count == 1 else f"{count} tasks"
