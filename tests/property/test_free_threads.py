"""No thread of a worker waits beside a task that it could run for longer than a claim takes, whatever comes between.

The real fetcher, settler, executor and ``InFlight`` (``simulated_process.py``): a claim and a settle take milliseconds,
and between any two lines anything may happen that the other threads can do.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from random import Random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_pglock.worker.child import fetcher
from django_pglock.worker.child.capacity import LoopCapacity, ThreadCapacity
from django_pglock.worker.child.claimer import Claimer
from django_pglock.worker.child.fetcher import Fetcher
from django_pglock.worker.child.in_flight import InFlight
from django_pglock.worker.child.settler import Settler
from tests.property.interleaving import by_clock_of
from tests.property.simulated_process import MAX_RESCUES, MODULES, SimulatedProcess, replacements
from tests.property.simulation import LONG
from tests.property.table import Call, Shape

SECONDS = st.sampled_from([0.0001, 0.005, 0.02, 0.05, 0.4, 3.0])


def run(shape: Shape, seed: int) -> None:
    """Let a worker run all tasks, in an order that the seed draws."""
    process = SimulatedProcess(Random(seed), shape)
    with ExitStack() as patches:
        for module, name, value in replacements(process):
            patches.enter_context(mock.patch.object(module, name, value))
        patches.enter_context(by_clock_of(process.schedule, *(each for each in MODULES if hasattr(each, "time"))))
        process.schedule.run()
    assert not process.table.ready


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    random = Random(draw(st.integers(0, 2**32)))
    seconds = draw(st.lists(SECONDS, min_size=1, max_size=3))
    keys = draw(st.sampled_from([0, 0, 1, 3]))
    share_async = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0]))
    share_refused = draw(st.sampled_from([0.0, 0.0, 0.2]))
    suspects = draw(st.sampled_from([0, 0, 0, 1]))
    queues = draw(st.sampled_from([["default"], ["a", "b"], ["a=3", "b"], ["a", "b", "empty"]]))
    names = [queue.partition("=")[0] for queue in queues if queue != "empty"]
    count, late = draw(st.integers(1, 25)), draw(st.integers(0, 6))
    calls = [
        Call(
            id=number,
            seconds=random.choice(seconds) * random.uniform(0.5, 1.5),
            is_async=random.random() < share_async,
            lock_key=f"key {random.randrange(keys)}" if keys and number < count else None,
            queue=random.choice(names),
            refusals=random.randint(1, 2) if random.random() < share_refused else 0,
            rescues=MAX_RESCUES if number < suspects else 0,
        )
        for number in range(count + late)
    ]
    return Shape(
        threads=draw(st.integers(1, 8)),
        calls=calls[:count],
        late=[(random.choice((0.001, 0.03, 0.3)), call) for call in calls[count:]],
        is_atomic=draw(st.booleans()),
        most_unsettled=draw(st.sampled_from([1, 2, 5, 3000])),
        slowness=draw(st.sampled_from([1, 1, 10])),
        queues=queues,
        is_listening=draw(st.booleans()),
        paused=draw(st.sampled_from([None, None, (names[0], 0.3), (names[-1], 2.0)])),
        silence=draw(st.sampled_from([(math.inf, 0.0), (math.inf, 0.0), (0.02, 0.5)])),
    )


@settings(max_examples=LONG or 35, deadline=None)
@given(shape=shapes(), seed=st.integers(0, 2**32))
def test_no_free_thread_waits_beside_a_ready_task(shape, seed):
    run(shape, seed)


def calls(count: int, **values) -> list[Call]:
    return [Call(id=number, **{"seconds": 0.02, **values}) for number in range(count)]


# Faults, each with a worker that shows it.


def settler_wakes_nobody(patch):
    remove = InFlight.remove

    def remove_silently(self, ended_claims):
        self._is_held_back = False
        remove(self, ended_claims)

    patch.setattr(InFlight, "remove", remove_silently)
    return Shape(threads=4, calls=calls(20), most_unsettled=1, slowness=10)


def thread_does_not_tell_that_it_is_free(patch):
    def free_silently(self, slot, cost=None):
        slot.ended += 1
        slot.began_at = None

    patch.setattr(ThreadCapacity, "free", free_silently)
    return Shape(threads=2, calls=calls(20))


def coroutine_does_not_tell_that_it_has_ended(patch):
    def free_silently(self):
        self._count -= 1
        self.ended += 1

    patch.setattr(LoopCapacity, "free", free_silently)
    return Shape(threads=1, calls=calls(20, is_async=True))


def thread_that_gives_back_stays_busy(patch):
    free = ThreadCapacity.free
    patch.setattr(ThreadCapacity, "free", lambda self, slot, cost=None: free(self, slot, cost) if cost else None)
    return Shape(threads=1, calls=calls(3, refusals=1))


def coroutine_that_is_given_back_keeps_its_place(patch):
    patch.setattr(LoopCapacity, "free", lambda self: None)
    return Shape(threads=1, calls=calls(5, refusals=1, is_async=True))


def claims_that_are_given_back_count_as_waiting(patch):
    def take_back(self):
        while self.inbox.qsize():
            yield self.inbox.get_nowait()

    patch.setattr(ThreadCapacity, "take_back", take_back)
    quick = calls(20, seconds=0.001)
    quick[10].seconds = 3.0
    return Shape(threads=1, calls=quick)


def given_back_tasks_are_not_announced(patch):
    patch.setattr(Settler, "_announce_reruns", lambda self, ended_claims: None)
    return Shape(threads=2, calls=calls(6, refusals=1), slowness=10)


def admitted_tasks_are_not_announced(patch):
    patch.setattr(InFlight, "notify_fetcher", lambda self: None)
    return Shape(threads=2, calls=calls(10, lock_key="key"))


def moments_of_an_earlier_poll_count(patch):
    free_capacities = Claimer.free_capacities
    patch.setattr(Fetcher, "_may_claim", lambda self: True)
    patch.setattr(Claimer, "free_capacities", lambda self: free_capacities(self) if self.in_flight.may_claim() else [])
    return Shape(threads=2, calls=calls(20), most_unsettled=1, slowness=10)


def end_of_the_first_poll_counts(patch):
    sleep = Fetcher._sleep

    def sleep_after_slow_poll(self):
        self._polled_at = fetcher.time.monotonic()
        sleep(self)

    patch.setattr(Fetcher, "_sleep", sleep_after_slow_poll)
    answers = (0.001, 0.001, 0.001, 0.08)
    return Shape(threads=2, calls=[], late=list(zip((0.002, 0.03), calls(2), strict=True)), answers=answers)


def other_queues_count_as_empty_before_they_were_polled(patch):
    def claim(self, capacities):
        notified = self.sleep.take_notified()
        return self.claimer.claim(capacities, notified=notified if self.sleep.since is not None else ())

    patch.setattr(Fetcher, "_claim", claim)
    # The worker cannot poll between the two tasks. It is notified only of the second one, which it cannot claim, when
    # its heartbeats arrive again.
    first, second = Call(id=0, seconds=0.02, queue="a"), Call(id=1, seconds=0.02, queue="b")
    return Shape(
        threads=2,
        calls=[],
        late=[(0.025, first), (0.555, second)],
        queues=["a", "b"],
        paused=("b", 5.0),
        silence=(0.03, 0.5),
        answers=(0.01,),
    )


def news_count_as_read_before_they_are_read(patch):
    wait = Fetcher._wait

    def wait_and_forget(self, seconds):
        wait(self, seconds)
        self.in_flight.has_new_tasks = False

    patch.setattr(Fetcher, "_wait", wait_and_forget)
    return Shape(threads=2, calls=calls(10, lock_key="key"))


def waiting_claims_are_kept_while_tasks_end(patch):
    patch.setattr(ThreadCapacity, "expected_wait", lambda self: 0.0)
    tasks = calls(30, seconds=0.15)
    for call in tasks[:5]:
        call.seconds = 0.0001
    return Shape(threads=1, calls=tasks[:5], late=[(0.3 * (call is tasks[5]), call) for call in tasks[5:]])


FAULTS = (
    settler_wakes_nobody,
    thread_does_not_tell_that_it_is_free,
    coroutine_does_not_tell_that_it_has_ended,
    thread_that_gives_back_stays_busy,
    coroutine_that_is_given_back_keeps_its_place,
    claims_that_are_given_back_count_as_waiting,
    given_back_tasks_are_not_announced,
    admitted_tasks_are_not_announced,
    moments_of_an_earlier_poll_count,
    end_of_the_first_poll_counts,
    other_queues_count_as_empty_before_they_were_polled,
    news_count_as_read_before_they_are_read,
    waiting_claims_are_kept_while_tasks_end,
)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda fault: fault.__name__)
def test_the_check_of_free_threads_finds_each_planted_fault(plant, monkeypatch):
    for seed in range(2000):
        with monkeypatch.context() as patch:
            shape = plant(patch)
            try:
                run(shape, seed)
            except AssertionError:
                break
    else:
        pytest.fail("no order of the threads shows the fault")
    # With the same order, nothing is wrong without the fault.
    run(shape, seed)
