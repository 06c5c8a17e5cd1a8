"""No thread of a worker waits beside a task that it could run for longer than a claim takes, whatever comes between.

The real fetcher, settler, executor and ``InFlight``, with a table of dicts: a claim and a settle take milliseconds, and
between any two lines anything may happen that the other threads can do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_pglock.store.outcome import SUCCEEDED, Outcome
from django_pglock.worker import capacity, in_flight
from django_pglock.worker.claiming import claimer, fetcher, function_kinds, sleep
from django_pglock.worker.claiming.claimer import Claimer
from django_pglock.worker.claiming.fetcher import Fetcher
from django_pglock.worker.claiming.function_kinds import ASYNC, EMPTY_PAUSE, SYNC
from django_pglock.worker.claiming.sleep import Sleep
from django_pglock.worker.ended_claim import EndedClaim
from django_pglock.worker.in_flight import InFlight
from django_pglock.worker.running import executor
from django_pglock.worker.running.executor import Executor
from django_pglock.worker.settling import settler
from django_pglock.worker.settling.settler import Settler
from tests.property.interleaving import Event, Lock, Queue, Schedule, by_clock_of
from tests.property.simulation import LONG

MODULES = (capacity, claimer, executor, fetcher, function_kinds, in_flight, settler, sleep)
#: Seconds that the database takes for a claim, or for a settle: mostly little, and much while others keep it busy.
ANSWERS = (0.0005, 0.002, 0.002, 0.01, 0.08)


class Call(SimpleNamespace):
    """A task, and the claim of it."""

    id: int
    seconds: float
    is_async: bool
    lock_key: str | None
    attempt = 1
    rescues = 0
    progress = None
    task_path = "call"


class House:
    """A worker process and its table, on a schedule."""

    def __init__(
        self, random: Random, threads: int, calls: list[Call], *, is_atomic: bool, late: Sequence[Call] = ()
    ) -> None:
        self.schedule = Schedule(random, {module.__file__ for module in MODULES}, self.check)
        self.random = random
        self.left = len(calls) + len(late)
        self.ready: list[Call] = []
        self.blocked: dict[str, list[Call]] = {}
        for call in calls:
            self.add(call)
        self.is_atomic = is_atomic
        self.in_flight = self.make_in_flight(threads)
        self.fetcher, self.settler, self.executor = FetcherHere(self), SettlerHere(self), ExecutorHere(self)
        self.coroutines: list[tuple[float, Call]] = []
        self.schedule.add("fetcher", self.fetch)
        self.schedule.add("settler", self.settle)
        for number, slot in enumerate(self.in_flight.threads.slots):
            self.schedule.add(f"thread {number}", lambda slot=slot: self.executor._work(slot))
        self.schedule.add("async starter", self.executor._start_coroutines)
        self.schedule.add("loop", self.run_coroutines)
        # Enqueued by somebody who notifies the worker only if that has asked for it.
        self.silent: list[Call] = []
        self.is_told = False
        if late:
            self.schedule.add("producer", lambda: self.produce(late))

    def make_in_flight(self, threads: int) -> InFlight:
        made = InFlight(threads)
        made.fetcher_wakeup = Event(self.schedule, "fetcher_wakeup")
        made.outbox = Queue(self.schedule, "outbox")
        made.threads.inbox = Queue(self.schedule, "inbox")
        made.coroutines.inbox = Queue(self.schedule, "coroutines")
        made._counting, made.coroutines._counting = Lock(self.schedule), Lock(self.schedule)
        return made

    # The table

    def add(self, call: Call) -> None:
        if call.lock_key is None:
            self.ready.append(call)
        elif call.lock_key in self.blocked:
            self.blocked[call.lock_key].append(call)
        else:
            self.blocked[call.lock_key] = []
            self.ready.append(call)

    def claim(self, kind: str, room: int) -> list[Call]:
        # The statement's snapshot is somewhere in between.
        self.wait_for_answer()
        wanted = [call for call in self.ready if kind == "both" or call.is_async is (kind == ASYNC)][:room]
        self.ready = [call for call in self.ready if call not in wanted]
        self.wait_for_answer()
        return wanted

    def wait_for_answer(self) -> None:
        self.schedule.sleep(self.random.choice(ANSWERS))

    def let_through(self, calls: list[Call]) -> bool:
        admitted = [self.blocked[call.lock_key].pop(0) for call in calls if self.blocked.get(call.lock_key)]
        self.ready += admitted
        return bool(admitted)

    def produce(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self.schedule.sleep(self.random.choice((0.001, 0.03, 0.3)))
            self.silent.append(call)
            self.ready.append(call)
            if self.is_told:
                self.fetcher.sleep.note_ready("default")
        self.schedule.sleep(math.inf)

    # The threads

    def fetch(self) -> None:
        while True:
            self.fetcher.turn()

    def settle(self) -> None:
        while True:
            self.settler.turn()
            if self.left == 0:
                self.schedule.end()

    def run_coroutines(self) -> None:
        while True:
            soonest = min((end for end, _ in self.coroutines), default=None)
            count = len(self.coroutines)
            seconds = None if soonest is None else soonest - self.schedule.now
            self.schedule.block("loop", lambda count=count: len(self.coroutines) > count, seconds)
            for each in [each for each in self.coroutines if each[0] <= self.schedule.now]:
                self.coroutines.remove(each)
                self.in_flight.end(self.ended(each[1]))
                self.in_flight.coroutines.free()

    def ended(self, call: Call) -> EndedClaim:
        return EndedClaim(call, SUCCEEDED, is_settled=self.is_atomic and not call.is_async)

    # What has to hold

    def check(self) -> None:
        """Called whenever nobody can run: then nobody may wait for somebody who sleeps."""
        places = self.schedule.places()
        if places["fetcher"] != "fetcher_wakeup":
            return
        # A claim for the loop alone is postponed for a while, lest it keeps threads waiting; but no longer.
        has_place = self.in_flight.coroutines.room() > 0
        is_put_off = 0 < self.fetcher.claimer.pauses.next_in(ASYNC) >= self.schedule.sleeps_for("fetcher") - 1e-6
        for kind, has_room in ((SYNC, "inbox" in places.values()), (ASYNC, has_place)):
            beside = [call for call in self.ready if call.is_async is (kind == ASYNC)]
            if kind == ASYNC and is_put_off:
                continue
            if not self.is_told and self.schedule.sleeps_for("fetcher") <= EMPTY_PAUSE + 1e-6:
                # Nobody is asked to tell of these, for the worker is busy; it looks again in a moment.
                beside = [call for call in beside if call not in self.silent]
            assert not (has_room and beside), f"{len(beside)} {kind} tasks are ready, there is room: {places}"


class FetcherHere(Fetcher):
    def __init__(self, house: House) -> None:
        rows: Any = SimpleNamespace(db="default")
        queues: Any = SimpleNamespace(only="default", serves=lambda name: True)
        awake: Any = SimpleNamespace(
            is_heartbeat_stale=lambda: False, is_listening=lambda: False, is_resting=lambda: False
        )
        super().__init__(
            house.in_flight, rows, uuid4(), queues, sleep=SleepHere(house, queues), liveness=awake, listens=True
        )
        self.house = house
        self._discovery = SimpleNamespace(is_due=False, next_in=math.inf, check=lambda **urgency: False)
        self.claimer = ClaimerHere(house, rows, queues)


class SleepHere(Sleep):
    def __init__(self, house: House, queues: Any) -> None:
        super().__init__(house.in_flight, "default", uuid4(), queues)
        self.house = house

    def _set_flag(self, *, is_sleeping: bool) -> None:
        self.house.wait_for_answer()
        self.house.is_told = is_sleeping
        self.house.wait_for_answer()


class ClaimerHere(Claimer):
    def __init__(self, house: House, rows: Any, queues: Any) -> None:
        super().__init__(house.in_flight, rows, uuid4(), queues)
        self.house = house
        self.pauses._clock = house.schedule.time.monotonic

    def _kinds(self) -> list[Any]:
        self._cursors = {kind: kind for kind in ("sync", "async", "both")}
        return [SYNC, ASYNC]

    def _claim_from(self, queues: list[str], cursors: Any, room: int) -> list[Any]:
        return self.house.claim(cursors, room)


class SettlerHere(Settler):
    def __init__(self, house: House) -> None:
        rows: Any = SimpleNamespace(db="default")
        super().__init__(house.in_flight, rows, None, progress=None, scheduled=lambda: None)
        self.house = house
        self.stopping = Event(house.schedule, "lingers")

    def _write(self, batch: list[EndedClaim]) -> list[EndedClaim]:
        if not self.house.is_atomic:
            self.house.wait_for_answer()
        self.house.left -= len(batch)
        return batch

    def _release_and_admit(self, ended_claims: list[EndedClaim]) -> None:
        calls = [ended.claim for ended in ended_claims]
        if any(call.lock_key is not None for call in calls):
            self.house.wait_for_answer()
        if self.house.let_through(calls):
            self.in_flight.notify_fetcher()


class TaskThread:
    def clean_up(self, claim: Any) -> None:
        pass


class ExecutorHere(Executor):
    def __init__(self, house: House) -> None:
        super().__init__(house.in_flight, "default", SimpleNamespace(watch_this_thread=TaskThread, task_threads=[]))
        self.house = house

    def _execute(self, claim: Any, thread: Any, is_coroutine: bool) -> EndedClaim | None:
        outcome: Outcome = SUCCEEDED
        if claim.is_async:
            self.house.coroutines.append((self.house.schedule.now + claim.seconds, claim))
            return None
        self.house.schedule.sleep(claim.seconds)
        ended = self.house.ended(claim)
        ended.outcome = outcome
        return ended


@pytest.fixture(autouse=True)
def by_kind(monkeypatch):
    monkeypatch.setattr(InFlight, "begin", _begin)
    monkeypatch.setattr(executor, "renew_connections", lambda using: None)
    # Few places, so that they are all taken.
    monkeypatch.setattr(capacity, "MOST_ASYNC", 3)


def _begin(self: InFlight, calls: list[Any]) -> None:
    for call in calls:
        if call.is_async:
            self.coroutines.put(call)
        else:
            self.threads.put([call])


def calls_of(random: Random, count: int, kinds_of_seconds: list[float], keys: int, share_async: float) -> list[Call]:
    return [
        Call(
            id=number,
            seconds=random.choice(kinds_of_seconds) * random.uniform(0.5, 1.5),
            is_async=random.random() < share_async,
            lock_key=f"key {random.randrange(keys)}" if keys else None,
        )
        for number in range(count)
    ]


@settings(max_examples=LONG or 100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    threads=st.integers(1, 4),
    count=st.integers(1, 25),
    seconds=st.lists(st.sampled_from([0.0001, 0.005, 0.02, 0.05, 0.4, 3.0]), min_size=1, max_size=3),
    keys=st.sampled_from([0, 0, 1, 3]),
    share_async=st.sampled_from([0.0, 0.0, 0.3, 1.0]),
    is_atomic=st.booleans(),
    late=st.integers(0, 6),
)
def test_no_free_thread_waits_beside_a_ready_task(seed, threads, count, seconds, keys, share_async, is_atomic, late):
    random = Random(seed)
    calls = calls_of(random, count, seconds, keys, share_async)
    more = calls_of(random, late, seconds, 0, share_async)
    house = House(random, threads, calls, is_atomic=is_atomic, late=more)
    with by_clock_of(house.schedule, *(module for module in MODULES if hasattr(module, "time"))):
        house.schedule.run()
    assert not house.ready
