"""No thread of a worker waits beside a task that it could run for longer than a claim takes, whatever comes between.

The real fetcher, settler, executor and hand, with a table of dicts: a claim and a settle take some milliseconds, and
between any two lines anything may happen that the other threads can do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_pglock.store.outcome import SUCCEEDED, Outcome
from django_pglock.worker import capacity
from django_pglock.worker import in_flight as hand
from django_pglock.worker.claiming import fetcher
from django_pglock.worker.claiming import function_kinds as kinds
from django_pglock.worker.claiming.fetcher import Fetcher
from django_pglock.worker.claiming.function_kinds import ASYNC, PAUSE, SYNC
from django_pglock.worker.in_flight import Ending, Hand
from django_pglock.worker.running import executor
from django_pglock.worker.running.executor import Executor
from django_pglock.worker.settling import settler
from django_pglock.worker.settling.settler import Settler
from tests.property.interleaving import Event, Lock, Queue, Schedule, by_clock_of

MODULES = (capacity, executor, fetcher, hand, kinds, settler)
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
        self.hand = self.make_hand(threads)
        self.fetcher, self.settler, self.executor = FetcherHere(self), SettlerHere(self), ExecutorHere(self)
        self.coroutines: list[tuple[float, Call]] = []
        self.schedule.add("fetcher", self.fetch)
        self.schedule.add("settler", self.settle)
        for number, slot in enumerate(self.hand.threads.slots):
            self.schedule.add(f"thread {number}", lambda slot=slot: self.executor._work(slot))
        self.schedule.add("beginner", self.executor._begin_coroutines)
        self.schedule.add("loop", self.run_coroutines)
        # Enqueued by somebody who notifies the worker only if that has asked for it.
        self.silent: list[Call] = []
        self.is_told = False
        if late:
            self.schedule.add("producer", lambda: self.produce(late))

    def make_hand(self, threads: int) -> Hand:
        made = Hand(threads)
        made.hungry = Event(self.schedule, "hungry")
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
                self.fetcher.hear("default")
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
                self.hand.ended(self.ending(each[1]))
                self.hand.coroutines.free()

    def ending(self, call: Call) -> Ending:
        return Ending(call, SUCCEEDED, is_settled=self.is_atomic and not call.is_async)

    # What has to hold

    def check(self) -> None:
        """Called whenever nobody can run: then nobody may wait for somebody who sleeps."""
        places = self.schedule.places()
        if places["fetcher"] != "hungry":
            return
        # A look for the loop alone is put off for a while, lest it keeps threads waiting; but no longer.
        has_place = self.hand.coroutines.room() > 0
        is_put_off = 0 < self.fetcher._looks.next_in(ASYNC) >= self.schedule.sleeps_for("fetcher") - 1e-6
        for kind, has_room in ((SYNC, "inbox" in places.values()), (ASYNC, has_place)):
            beside = [call for call in self.ready if call.is_async is (kind == ASYNC)]
            if kind == ASYNC and is_put_off:
                continue
            if not self.is_told and self.schedule.sleeps_for("fetcher") <= PAUSE + 1e-6:
                # Nobody is asked to tell of these, for the worker is busy; it looks again in a moment.
                beside = [call for call in beside if call not in self.silent]
            assert not (has_room and beside), f"{len(beside)} {kind} tasks are ready, there is room: {places}"


class FetcherHere(Fetcher):
    def __init__(self, house: House) -> None:
        rows: Any = SimpleNamespace(db="default")
        queues: Any = SimpleNamespace(only="default", serves=lambda name: True)
        super().__init__(house.hand, rows, SimpleNamespace(id=None), queues, listens=True)
        self.house = house
        self._discovery = SimpleNamespace(is_due=False, look=lambda **urgency: False)
        self._looks._clock = house.schedule.time.monotonic

    def _kinds(self) -> list[Any]:
        self._claims = dict.fromkeys(("sync", "async", "both"))
        self._claims = {kind: kind for kind in self._claims}
        return [SYNC, ASYNC]

    def _ask_for_news(self, *, is_sleeping: bool) -> None:
        self.house.wait_for_answer()
        self.house.is_told = is_sleeping
        self.house.wait_for_answer()

    def _claim_from(self, queues: list[str], of_worker: Any, room: int) -> list[Any]:
        return self.house.claim(of_worker, room)


class SettlerHere(Settler):
    def __init__(self, house: House) -> None:
        rows: Any = SimpleNamespace(db="default")
        super().__init__(house.hand, rows, None, progress=None, scheduled=lambda: None)
        self.house = house
        self.stopping = Event(house.schedule, "lingers")

    def _write(self, batch: list[Ending]) -> list[Ending]:
        if not self.house.is_atomic:
            self.house.wait_for_answer()
        self.house.left -= len(batch)
        return batch

    def _let_through(self, endings: list[Ending]) -> None:
        calls = [ending.claim for ending in endings]
        if any(call.lock_key is not None for call in calls):
            self.house.wait_for_answer()
        if self.house.let_through(calls):
            self.hand.tell_news()


class Seat:
    def clean_up(self, claim: Any) -> None:
        pass


class ExecutorHere(Executor):
    def __init__(self, house: House) -> None:
        super().__init__(house.hand, "default", SimpleNamespace(seat=Seat, seats=[]))
        self.house = house

    def _execute(self, claim: Any, seat: Any) -> Ending | None:
        outcome: Outcome = SUCCEEDED
        if claim.is_async:
            self.house.coroutines.append((self.house.schedule.now + claim.seconds, claim))
            return None
        self.house.schedule.sleep(claim.seconds)
        ending = self.house.ending(claim)
        ending.outcome = outcome
        return ending


@pytest.fixture(autouse=True)
def by_kind(monkeypatch):
    monkeypatch.setattr(Hand, "begin", _begin)
    monkeypatch.setattr(executor, "look_at_connections", lambda using: None)
    # Few places, so that they are all taken.
    monkeypatch.setattr(capacity, "MOST_ASYNC", 3)


def _begin(self: Hand, call: Any) -> None:
    if call.is_async:
        self.coroutines.put(call)
    else:
        self.threads.inbox.put(call)


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


@settings(max_examples=300, deadline=None)
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
