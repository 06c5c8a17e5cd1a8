"""A worker process and its table, on a schedule: the real fetcher, settler, executor and ``InFlight``.

The statements of ``store/`` are replaced: the alias of the database is a ``Table`` of Python objects, which answers
after some milliseconds.
"""

from __future__ import annotations

import math
from random import Random
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from django_pglock.store.outcome import SUCCEEDED, GivenBack
from django_pglock.store.wake import NEGATIVE_TTL
from django_pglock.worker.child import (
    capacity,
    claimer,
    exclusive_run,
    executor,
    fetcher,
    in_flight,
    queue_cursor,
    settler,
    sleep,
)
from django_pglock.worker.child.claimer import ASYNC, EMPTY_PAUSE, SYNC
from django_pglock.worker.child.executor import Executor
from django_pglock.worker.child.fetcher import Fetcher
from django_pglock.worker.child.in_flight import EndedClaim, InFlight
from django_pglock.worker.child.settler import Settler
from django_pglock.worker.child.sleep import Sleep
from django_pglock.worker.queues import Queues
from tests.property.interleaving import Event, Lock, Queue, Schedule
from tests.property.table import Call, Shape, Table

#: The modules whose lines are interleaved.
MODULES = (capacity, claimer, exclusive_run, executor, fetcher, in_flight, queue_cursor, settler, sleep)
MAX_RESCUES = 3
#: The largest number of seconds for which a claim may wait in the process. The fetcher checks it after 0.2 s.
LONGEST_WAIT_HERE = 1.0


class SimulatedProcess:
    """A worker process, and the others that its table knows."""

    def __init__(self, random: Random, shape: Shape) -> None:
        self.shape = shape
        self.schedule = Schedule(random, {module.__file__ for module in MODULES}, self.check)
        self.table = Table(self.schedule, random, shape)
        self.in_flight = self.make_in_flight(shape.threads)
        self.queues = Queues(shape.queues)
        self.was_stale = False
        self.coroutines: list[tuple[float, Call]] = []
        self.fetcher = FetcherHere(self)
        self.settler, self.executor = SettlerHere(self), ExecutorHere(self)
        self.table.notify = self.fetcher.sleep.note_ready
        self.schedule.add("fetcher", self.fetch)
        self.schedule.add("settler", self.settle)
        for number, slot in enumerate(self.in_flight.threads.slots):
            self.schedule.add(f"thread {number}", lambda slot=slot: self.executor._work(slot))
        self.schedule.add("async starter", self.executor._start_coroutines)
        self.schedule.add("loop", self.run_coroutines)
        self.schedule.add("upkeep", self.promote)
        if shape.late:
            self.schedule.add("producer", self.produce)
        if shape.paused:
            self.schedule.add("operator", self.resume)

    def make_in_flight(self, threads: int) -> InFlight:
        made = InFlight(threads)
        made.fetcher_wakeup = Event(self.schedule, "fetcher_wakeup")
        made.outbox = Queue(self.schedule, "outbox")
        made.threads.inbox = Queue(self.schedule, "inbox")
        made.coroutines.inbox = Queue(self.schedule, "coroutines")
        made._counting, made.coroutines._counting = Lock(self.schedule), Lock(self.schedule)
        return made

    def check_heartbeat(self) -> bool:
        begins, seconds = self.shape.silence
        self.was_stale = begins <= self.schedule.now - self.schedule.began_at < begins + seconds
        return not self.was_stale

    # The threads

    def fetch(self) -> None:
        while True:
            self.fetcher.run_once()

    def settle(self) -> None:
        while True:
            self.settler.run_once()
            if self.table.left == 0:
                self.schedule.end()

    def run_coroutines(self) -> None:
        while True:
            soonest = min((end for end, _ in self.coroutines), default=None)
            count = len(self.coroutines)
            seconds = None if soonest is None else soonest - self.schedule.now
            self.schedule.block("loop", lambda count=count: len(self.coroutines) > count, seconds)
            for each in [each for each in self.coroutines if each[0] <= self.schedule.now]:
                self.coroutines.remove(each)
                self.in_flight.end(EndedClaim(each[1], SUCCEEDED))
                self.in_flight.coroutines.free()

    def produce(self) -> None:
        for seconds, call in self.shape.late:
            self.schedule.sleep(seconds)
            self.table.enqueue(call)
        self.schedule.sleep(math.inf)

    def promote(self) -> None:
        while True:
            soonest = min((at for at, _ in self.table.scheduled), default=None)
            count = len(self.table.scheduled)
            seconds = None if soonest is None else soonest - self.schedule.now
            self.schedule.block("upkeep", lambda count=count: len(self.table.scheduled) > count, seconds)
            self.table.promote()

    def resume(self) -> None:
        self.schedule.sleep(self.shape.paused[1])
        self.table.resume()
        self.schedule.sleep(math.inf)

    # What has to hold

    def check(self) -> None:
        """Called whenever nobody can run: then no free thread or slot may wait beside a task that nobody looks for."""
        places = self.schedule.places()
        if places["fetcher"] != "fetcher_wakeup" or self.was_stale or self.fetcher._exclusive_run._suspect is not None:
            return
        if self.in_flight._is_held_back and places["settler"] != "outbox":
            # Too many outcomes wait for the database. When it has written the next ones, the settler wakes the fetcher.
            return
        slots_in_use = len(self.coroutines) + self.in_flight.coroutines.inbox.qsize()
        assert self.in_flight.coroutines.running == slots_in_use + (places["async starter"] != "coroutines")
        # A claim for the loop alone is postponed for a while, so that it does not keep threads waiting, but no longer.
        is_put_off = 0 < self.fetcher.claimer.pauses.next_in(ASYNC) >= self.schedule.sleeps_for("fetcher") - 1e-6
        has_free_slot = self.in_flight.coroutines.free_capacity() > 0 and not is_put_off
        claimable = [call for call in self.table.claimable() if call.id not in self.table.unanswered]
        beside = [call for call in claimable if not self.is_looked_for_soon(call)]
        for kind, is_free in ((SYNC, "inbox" in places.values()), (ASYNC, has_free_slot)):
            alike = [call for call in beside if call.task_path == kind]
            assert not (is_free and alike), f"{len(alike)} {kind} tasks are ready, threads or slots are free: {places}"

    def is_looked_for_soon(self, call: Call) -> bool:
        """Return whether the worker was not notified of this task, but will poll in a moment.

        A worker that does not listen asks for no notifications: it finds what others have made ready by its next poll.
        """
        if not self.shape.is_listening:
            return call.id in self.table.silent and self.schedule.sleeps_for("fetcher") < math.inf
        since = self.fetcher.sleep.since
        is_in_a_moment = self.schedule.sleeps_for("fetcher") <= max(EMPTY_PAUSE, NEGATIVE_TTL * 1.2) + 1e-6
        is_awake = since is None or self.schedule.now - since <= NEGATIVE_TTL * 1.2 + 1e-6
        return call.id in self.table.silent and is_awake and is_in_a_moment


class FetcherHere(Fetcher):
    def __init__(self, process: SimulatedProcess) -> None:
        awake: Any = SimpleNamespace(is_alive=process.check_heartbeat, is_notified=lambda: process.shape.is_listening)
        rows: Any = process.table
        waits = Sleep(process.in_flight, rows, uuid4(), process.queues)
        super().__init__(process.in_flight, rows, uuid4(), process.queues, sleep=waits, heartbeat=awake)
        self.comparison = SimpleNamespace(compare_if_due=lambda: None, is_due=False)
        self._discovery = SimpleNamespace(
            is_due=False, next_in=math.inf, has_unknown=False, check=lambda **urgency: False
        )
        now = process.schedule.time.monotonic
        self.claimer.pauses._clock = self.claimer._ready._clock = now


class SettlerHere(Settler):
    def __init__(self, process: SimulatedProcess) -> None:
        progress: Any = SimpleNamespace(write=lambda claims: (list(claims), [])[1])
        ready = process.fetcher.sleep.note_ready
        super().__init__(process.in_flight, process.table, None, progress=progress, ready=ready, scheduled=lambda: None)
        self.history = SimpleNamespace(count=lambda batch: None, due_in=lambda: None)
        self.stopping = Event(process.schedule, "lingers")

    def open(self) -> None:
        """Its table answers without a session."""


class TaskThread:
    def clean_up(self, claim: Any) -> None:
        pass


class ExecutorHere(Executor):
    def __init__(self, process: SimulatedProcess) -> None:
        watchdog: Any = SimpleNamespace(watch_this_thread=TaskThread)
        super().__init__(process.in_flight, "default", watchdog)
        self.process = process
        self._stopping = Event(process.schedule, "pauses")

    def _start_async(self) -> None:
        """It is there from the beginning."""

    def execute(self, claim: Any, *_others: Any) -> EndedClaim | None:
        waited = self.process.schedule.now - claim.received_at
        # A coroutine begins when the thread that starts coroutines has a connection, a suspect when it can run alone.
        may_wait = claim.is_async or claim.rescues == MAX_RESCUES
        assert may_wait or waited <= LONGEST_WAIT_HERE, f"{claim} has waited for {waited:.1f} s"
        if claim.attempt <= claim.refusals:
            return EndedClaim(claim, GivenBack())
        if claim.is_async:
            self.process.coroutines.append((self.process.schedule.now + claim.seconds, claim))
            return None
        self.process.schedule.sleep(claim.seconds)
        if self.process.shape.is_atomic:
            self.process.table.end(claim, SUCCEEDED)
        return EndedClaim(claim, SUCCEEDED, is_settled=self.process.shape.is_atomic)


def replacements(process: SimulatedProcess) -> list[tuple[Any, str, Any]]:
    """Return what to replace in the worker's modules: object, name and replacement."""
    most_unsettled = process.shape.most_unsettled
    known: Any = SimpleNamespace(
        count=lambda: 2, known_paths=lambda: [ASYNC, SYNC], is_async=lambda path: path == ASYNC, has_fair=lambda: False
    )

    def cursors(*args: Any, **options: Any) -> Any:
        return queue_cursor.QueueCursors(*args, **options, clock=process.schedule.time.monotonic)

    return [
        # Few slots, so that they are all taken.
        (capacity, "MOST_ASYNC", 3),
        (in_flight, "MOST_UNSETTLED", most_unsettled),
        (settler, "LARGEST_BATCH", max(1, most_unsettled // 2)),
        (in_flight, "registry", known),
        (claimer, "registry", known),
        (claimer, "QueueCursors", cursors),
        (fetcher, "random", process.table.random),
        (fetcher, "keeps_plans", lambda table: True),
        (exclusive_run, "get_settings", lambda: SimpleNamespace(MAX_RESCUES=MAX_RESCUES)),
        (queue_cursor, "claim_statement", lambda table, **options: table.claim_statement(**options)),
        (queue_cursor, "claims_of", lambda rows, worker: rows),
        (queue_cursor, "claim_fair", lambda table, **options: ([], "")),
        (queue_cursor, "ready_queues", Table.ready_queues),
        (
            sleep,
            "write_sleep_flag",
            lambda table, worker, *, is_sleeping: table.write_sleep_flag(is_sleeping=is_sleeping),
        ),
        (sleep, "wake_others", lambda table, queues, worker, *, hops: table.wait()),
        (settler, "settle", lambda table, outcomes, worker: table.settle(outcomes)),
        (settler, "settle_unobserved", Table.settle_unobserved),
        (settler, "release", lambda table, ids: list(ids)[:0]),
        (settler, "admit_without_wake", Table.admit),
        (settler, "wake_except", lambda table, queues, worker: table.wait()),
        (settler, "wake", Table.wake),
        (settler, "report", lambda ended: None),
        (settler, "close_unusable_connections", lambda *, without: None),
        (executor, "execute", process.executor.execute),
        (executor, "renew_connections", lambda using: None),
    ]
