"""A worker process and its table, on a schedule: the real feeder, settler, executor and ``InFlight``.

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
from django_pglock.worker.child import claimer, executor, feeder, in_flight, settler
from django_pglock.worker.child.claimer import ASYNC, SYNC, Claimer
from django_pglock.worker.child.executor import Executor
from django_pglock.worker.child.feeder import EMPTY_PAUSE, Feeder
from django_pglock.worker.child.in_flight import EndedClaim, InFlight
from django_pglock.worker.child.settler import Settler
from django_pglock.worker.queues import Queues
from tests.property.interleaving import Event, Lock, Queue, Schedule
from tests.property.table import Call, Shape, Table

#: The modules whose lines are interleaved.
MODULES = (claimer, executor, feeder, in_flight, settler)
#: The largest number of seconds for which a claim may wait in the process. The feeder checks it after 0.2 s.
LONGEST_WAIT_HERE = 1.0


class SimulatedProcess:
    """A worker process, and the others that its table knows."""

    def __init__(self, random: Random, shape: Shape) -> None:
        self.shape = shape
        self.schedule = Schedule(random, {module.__file__ for module in MODULES}, self.check)
        self.table = Table(self.schedule, random, shape)
        self.in_flight = self.make_in_flight(shape.threads)
        self.coroutines: list[tuple[float, Call]] = []
        self.feeder = FeederHere(self)
        self.settler, self.executor = SettlerHere(self), ExecutorHere(self)
        self.table.notify = self.in_flight.notify_feeder
        self.schedule.add("feeder", self.fetch)
        self.schedule.add("settler", self.settle)
        for number, slot in enumerate(self.in_flight.threads.slots):
            self.schedule.add(f"thread {number}", lambda slot=slot: self.executor._work(slot))
        self.schedule.add("async starter", self.executor._start_coroutines)
        self.schedule.add("loop", self.run_coroutines)
        self.schedule.add("upkeep", self.promote)
        if shape.late:
            self.schedule.add("producer", self.produce)

    def make_in_flight(self, threads: int) -> InFlight:
        made = InFlight(threads, queues=Queues(self.shape.queues))
        made.feeder_wakeup = Event(self.schedule, "feeder_wakeup")
        made.outbox = Queue(self.schedule, "outbox")
        made.threads.inbox = Queue(self.schedule, "inbox")
        made.coroutines.inbox = Queue(self.schedule, "coroutines")
        made.coroutines._counting = Lock(self.schedule)
        return made

    # The threads

    def fetch(self) -> None:
        while True:
            self.feeder.run_once()

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

    # What has to hold

    def check(self) -> None:
        """Called whenever nobody can run: then no free thread or slot may wait beside a task that nobody looks for."""
        places = self.schedule.places()
        if places["feeder"] != "feeder_wakeup":
            return
        if self.in_flight._is_held_back and places["settler"] != "outbox":
            # Too many outcomes wait for the database. When it has written the next ones, the settler wakes the feeder.
            return
        slots_in_use = len(self.coroutines) + self.in_flight.coroutines.inbox.qsize()
        assert self.in_flight.coroutines.running == slots_in_use + (places["async starter"] != "coroutines")
        has_free_slot = self.in_flight.coroutines.free_capacity() > 0
        claimable = [call for call in self.table.ready if call.id not in self.table.unanswered]
        beside = [call for call in claimable if not self.is_looked_for_soon(call)]
        for kind, is_free in ((SYNC, "inbox" in places.values()), (ASYNC, has_free_slot)):
            # A claim for one kind alone is postponed for a while after the one before it, but no longer.
            is_postponed = 0 < self.feeder._paused_until[kind] - self.schedule.now >= self.sleeps_for() - 1e-6
            alike = [call for call in beside if call.task_path == kind and not is_postponed]
            assert not (is_free and alike), f"{len(alike)} {kind} tasks are ready, threads or slots are free: {places}"

    def sleeps_for(self) -> float:
        return self.schedule.sleeps_for("feeder")

    def is_looked_for_soon(self, call: Call) -> bool:
        """Return whether the worker was not notified of this task, but will poll in a moment.

        A worker that does not listen asks for no notifications: it finds what others have made ready by its next poll.
        """
        if not self.shape.is_listening:
            return call.id in self.table.silent and self.sleeps_for() < math.inf
        since = self.feeder.asked_at
        is_in_a_moment = self.sleeps_for() <= max(EMPTY_PAUSE, NEGATIVE_TTL * 1.2) + 1e-6
        is_awake = self.schedule.now - since <= NEGATIVE_TTL * 1.2 + 1e-6
        return call.id in self.table.silent and is_awake and is_in_a_moment


class FeederHere(Feeder):
    def __init__(self, process: SimulatedProcess) -> None:
        awake: Any = SimpleNamespace(is_alive=lambda: True, is_notified=lambda: process.shape.is_listening)
        rows: Any = process.table
        queues = Queues(process.shape.queues)
        own = Claimer(rows, uuid4(), queues, clock=process.schedule.time.monotonic)
        own.searched_at = math.inf
        super().__init__(process.in_flight, own, heartbeat=awake)

    def _has_uncertain_claims(self) -> bool:
        """Its table answers."""
        return False


class SettlerHere(Settler):
    def __init__(self, process: SimulatedProcess) -> None:
        table: Any = process.table
        super().__init__(process.in_flight, table)
        self.history = SimpleNamespace(count=lambda batch: None, due_in=lambda: math.inf)
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
        self.loop: Any = SimpleNamespace(start=lambda: None, run=None)

    def _start_async(self) -> None:
        """It is there from the beginning."""

    def execute(self, claim: Any, *_others: Any) -> EndedClaim | None:
        waited = self.process.schedule.now - claim.received_at
        # A coroutine begins when the thread that starts coroutines has a connection.
        assert claim.is_async or waited <= LONGEST_WAIT_HERE, f"{claim} has waited for {waited:.1f} s"
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
        count=lambda: 2, known_paths=lambda: [ASYNC, SYNC], is_async=lambda path: path == ASYNC
    )

    return [
        # Few slots, so that they are all taken.
        (in_flight, "MOST_ASYNC", 3),
        (in_flight, "MOST_UNSETTLED", most_unsettled),
        (settler, "LARGEST_BATCH", max(1, most_unsettled // 2)),
        (in_flight, "registry", known),
        (claimer, "registry", known),
        (feeder, "random", process.table.random),
        (feeder, "keeps_plans", lambda table: True),
        (claimer, "claim_statement", lambda table, **options: table.claim_statement(**options)),
        (claimer, "claims_of", lambda rows, worker: rows),
        (claimer, "claim_fair", lambda table, **options: ([], "")),
        (claimer, "ready_queues", Table.ready_queues),
        (
            feeder,
            "write_sleep_flag",
            lambda table, worker, *, is_sleeping: table.write_sleep_flag(is_sleeping=is_sleeping),
        ),
        (feeder, "wake_others", lambda table, queues, worker, *, hops: table.wait()),
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
