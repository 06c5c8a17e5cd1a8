"""How many tasks a process claims: enough for its threads, in few claims, and not more than its threads begin soon."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest

from django_pglock.worker.child import capacity
from django_pglock.worker.child import in_flight as module
from django_pglock.worker.child.capacity import MOST_ASYNC, MOST_AT_ONCE, MOST_PREFETCHED, PREFETCH_TIME
from django_pglock.worker.child.in_flight import InFlight

QUICK, SLOW = 1e-6, 1.0


def filled(count, *, threads=4, cost=QUICK):
    """Return what one process has in flight: so many claims, none of them begun."""
    in_flight = InFlight(threads)
    in_flight.threads.expect_cost(cost)
    in_flight.begin_all([SimpleNamespace(id=number, attempt=1, task_path="call") for number in range(count)])
    return in_flight


def begin_claims(in_flight, count):
    """Let so many threads begin something, and return their slots with what they have begun."""
    return [(slot, in_flight.threads.next(slot)) for slot in in_flight.threads.slots[:count]]


def test_each_free_thread_gets_one_claim_and_long_tasks_are_not_prefetched():
    assert filled(0, cost=SLOW).threads.free_capacity() == 4
    assert filled(3, cost=SLOW).threads.free_capacity() == 1
    assert filled(4, cost=SLOW).threads.free_capacity() == 0
    in_flight = filled(4, cost=SLOW)
    begin_claims(in_flight, 4)
    assert in_flight.threads.free_capacity() == 0


def test_nothing_is_prefetched_before_a_run_time_is_known():
    threads = InFlight(2).threads
    assert threads.free_capacity() == 2
    threads.slots[0].began_at = time.monotonic()
    assert threads.free_capacity() == 1
    assert threads.next_change_in(0.0) == math.inf


def test_quick_tasks_are_claimed_in_few_large_batches():
    assert filled(0).threads.free_capacity() == MOST_AT_ONCE
    assert filled(2 + MOST_PREFETCHED // 2).threads.free_capacity() == MOST_AT_ONCE
    assert filled(3 + MOST_PREFETCHED // 2).threads.free_capacity() == 0


@pytest.mark.parametrize(
    ("running_for", "expected"),
    [(0.2, 0), (0.4 - PREFETCH_TIME * 1.5, 0), (0.4 - PREFETCH_TIME / 2, 1), (0.4 + PREFETCH_TIME / 2, 1), (1.0, 0)],
)
def test_the_next_long_task_is_claimed_shortly_before_its_thread_is_free(running_for, expected, monkeypatch):
    """And not for a task that takes longer than was expected: it may take any time."""
    in_flight = filled(1, threads=1, cost=0.4)
    [(slot, _)] = begin_claims(in_flight, 1)
    monkeypatch.setattr(capacity, "time", SimpleNamespace(monotonic=lambda: slot.began_at + running_for))
    assert in_flight.threads.free_capacity() == expected
    in_flight.begin_all([SimpleNamespace(id=2, attempt=1, task_path="call")])
    assert in_flight.threads.free_capacity() == 0
    if running_for < 0.4 - PREFETCH_TIME:
        assert in_flight.threads.next_change_in(slot.began_at) == pytest.approx(0.4 - PREFETCH_TIME - running_for)
    else:
        assert in_flight.threads.next_change_in(slot.began_at) == 0, "expected since then"
        assert in_flight.threads.next_change_in(slot.began_at + running_for) == math.inf


def test_a_thread_requests_more_tasks_when_half_are_done():
    in_flight = filled(MOST_PREFETCHED // 2 + 3)
    (first, _), (second, _) = begin_claims(in_flight, 2)
    assert not in_flight.fetcher_wakeup.is_set()
    in_flight.threads.free(first, cost=QUICK)
    assert not in_flight.fetcher_wakeup.is_set()
    in_flight.threads.next(first)
    in_flight.threads.free(second, cost=QUICK)
    assert in_flight.fetcher_wakeup.is_set()


def end(in_flight, *costs):
    """Let the threads in turn end a task for each cost."""
    slots = in_flight.threads.slots
    for number, cost in enumerate(costs):
        in_flight.begin_all([SimpleNamespace(id=(number, cost), attempt=1, task_path="call")])
        in_flight.threads.next(slots[number % len(slots)])
        in_flight.threads.free(slots[number % len(slots)], cost=cost)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("cost", [PREFETCH_TIME / 10, PREFETCH_TIME / 2, PREFETCH_TIME])
def test_slightly_long_tasks_count_after_they_occupied_the_threads_for_the_prefetch_time(threads, cost):
    in_flight = filled(0, threads=threads)
    needed = int(threads * PREFETCH_TIME / cost)
    end(in_flight, *[cost] * (needed - 1))
    assert in_flight.threads.free_capacity() == MOST_AT_ONCE
    end(in_flight, *[cost] * 2)
    assert in_flight.threads.free_capacity() <= 8 * threads * PREFETCH_TIME / cost


def test_coroutines_have_a_separate_capacity(monkeypatch):
    monkeypatch.setattr(module.registry, "is_async", lambda path: path == "coroutine")
    in_flight = InFlight(1)
    in_flight.begin_all([SimpleNamespace(id=number, attempt=1, task_path="coroutine") for number in range(MOST_ASYNC)])
    assert (in_flight.threads.free_capacity(), in_flight.coroutines.free_capacity(), in_flight.waiting) == (
        1,
        0,
        MOST_ASYNC,
    )
    in_flight.coroutines.next()
    in_flight.coroutines.free()
    assert (in_flight.coroutines.free_capacity(), in_flight.coroutines.running, in_flight.fetcher_wakeup.is_set()) == (
        1,
        MOST_ASYNC - 1,
        True,
    )
    assert in_flight.give_back_waiting() == MOST_ASYNC - 1
    assert (in_flight.coroutines.running, in_flight.coroutines.wait(0)) == (0, True)
