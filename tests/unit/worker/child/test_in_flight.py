"""How many tasks a process claims: enough for its threads, in few claims, and not more than its threads begin soon."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from django_pglock.worker.child import in_flight as module
from django_pglock.worker.child.in_flight import (
    LONGEST_WAIT,
    MOST_ASYNC,
    MOST_AT_ONCE,
    MOST_PREFETCHED,
    PREFETCH_TIME,
    InFlight,
    resident_memory,
)

QUICK, SLOW = 1e-6, 1.0


def filled(count, *, threads=4, cost=QUICK, path="call"):
    """Return what one process has in flight: so many claims, none of them begun."""
    in_flight = InFlight(threads)
    in_flight.threads.cost = cost
    in_flight.begin_all([SimpleNamespace(id=number, attempt=1, task_path=path) for number in range(count)])
    return in_flight


def begin_claims(in_flight, count):
    """Let so many threads begin something, and return their slots."""
    slots = in_flight.threads.slots[:count]
    for slot in slots:
        in_flight.threads.next(slot)
    return slots


def test_each_free_thread_gets_one_claim_and_long_tasks_are_not_prefetched():
    assert filled(0, cost=SLOW).threads.free_capacity() == 4
    assert filled(3, cost=SLOW).threads.free_capacity() == 1
    in_flight = filled(4, cost=SLOW)
    assert in_flight.threads.free_capacity() == 0
    begin_claims(in_flight, 4)
    assert in_flight.threads.free_capacity() == 0


def test_nothing_is_prefetched_before_a_run_time_is_known():
    in_flight = filled(1, threads=2, cost=None)
    assert in_flight.threads.free_capacity() == 1
    begin_claims(in_flight, 1)
    assert in_flight.threads.free_capacity() == 1


def test_quick_tasks_are_claimed_in_few_large_batches():
    assert filled(0).threads.free_capacity() == MOST_AT_ONCE
    assert filled(2 + MOST_PREFETCHED // 2).threads.free_capacity() == MOST_AT_ONCE
    assert filled(3 + MOST_PREFETCHED // 2).threads.free_capacity() == 0


def test_a_thread_requests_more_tasks_when_half_are_done():
    in_flight = filled(MOST_PREFETCHED // 2 + 3)
    assert in_flight.threads.free_capacity() == 0
    first, second = begin_claims(in_flight, 2)
    in_flight.threads.free(first, cost=QUICK)
    assert not in_flight.feeder_wakeup.is_set()
    in_flight.threads.next(first)
    in_flight.threads.free(second, cost=QUICK)
    assert in_flight.feeder_wakeup.is_set()


@pytest.mark.parametrize("threads", [1, 4])
def test_prefetched_tasks_are_so_much_work_as_the_last_ones_have_shown(threads):
    """One long task ends the prefetch, and a short one that had to wait for a processor does not."""
    in_flight = filled(0, threads=threads)
    [slot] = begin_claims(filled(1, threads=1), 1)
    in_flight.threads.free(slot, cost=0.005)
    assert in_flight.threads.free_capacity() > 40 * threads
    for _ in range(50):
        in_flight.threads.free(slot, cost=PREFETCH_TIME / 10)
    assert in_flight.threads.free_capacity() == pytest.approx(11 * threads, abs=2)
    in_flight.threads.free(slot, cost=20.0)
    assert in_flight.threads.free_capacity() == threads, "one for each free thread"


@pytest.mark.parametrize(
    ("threads", "count", "cost", "running_for", "are_late"),
    [
        (2, 100, QUICK, 0.1, False),
        (2, 100, 0.01, 0.1, True),
        (2, 3, QUICK, LONGEST_WAIT, True),
        (2, 2, QUICK, LONGEST_WAIT, False),
    ],
    ids=["short", "longer than expected", "blocked", "none waits"],
)
def test_claims_that_have_waited_are_late_if_they_do_not_begin_soon(
    threads, count, cost, running_for, are_late, monkeypatch
):
    in_flight, now = filled(count, threads=threads, cost=cost), [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert not in_flight.threads.are_late(), "which is the first check"
    now[0] += LONGEST_WAIT - running_for
    begin_claims(in_flight, threads)
    now[0] += running_for
    assert in_flight.threads.are_late() is are_late
    if running_for == LONGEST_WAIT and are_late:
        in_flight.give_back_waiting()
        assert in_flight.threads.free_capacity() == 0, "the same would happen again"


def test_coroutines_have_a_separate_capacity(monkeypatch):
    monkeypatch.setattr(module.registry, "is_async", lambda path: path == "coroutine")
    in_flight = filled(MOST_ASYNC, threads=1, cost=None, path="coroutine")
    coroutines = in_flight.coroutines
    assert (in_flight.threads.free_capacity(), coroutines.free_capacity(), in_flight.waiting) == (1, 0, MOST_ASYNC)
    coroutines.inbox.get()
    coroutines.free()
    assert (coroutines.free_capacity(), coroutines.running) == (1, MOST_ASYNC - 1)
    assert in_flight.feeder_wakeup.is_set()
    assert in_flight.give_back_waiting() == MOST_ASYNC - 1
    assert coroutines.running == 0


def test_the_memory_limit_is_in_mebibytes_and_is_checked_after_the_first_task(monkeypatch):
    in_flight = InFlight(1)
    assert resident_memory() > 5 * 2**20
    assert in_flight.limit_reached(1, has_ended_any=False) == ""
    monkeypatch.setattr(module, "resident_memory", lambda: 300 * 2**20)
    assert in_flight.limit_reached(300, has_ended_any=True) == ""
    assert in_flight.limit_reached(299, has_ended_any=True) == "it uses 300 MiB of memory"
    assert in_flight.limit_reached(None, has_ended_any=True) == ""


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("freebsd14", 1024)])
def test_where_the_system_does_not_show_it_the_peak_is_taken(monkeypatch, platform, unit):
    """getrusage() counts in bytes on macOS, in kibibytes elsewhere."""

    def missing(path):
        raise FileNotFoundError(path)

    resource = pytest.importorskip("resource")
    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=5000))
    monkeypatch.setattr(module.sys, "platform", platform)
    assert resident_memory() == 5000 * unit
