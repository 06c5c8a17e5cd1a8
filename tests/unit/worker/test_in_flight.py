"""How many tasks a process asks for: enough for its threads, few claims for many tasks, nothing that is hoarded."""

from __future__ import annotations

import gc
import math
import time
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_pglock.management.worker_process import GARBAGE, collect_garbage_less_often
from django_pglock.tasks.claim import date_of
from django_pglock.tasks.outcome import SUCCEEDED
from django_pglock.worker import capacity
from django_pglock.worker import in_flight as module
from django_pglock.worker.capacity import AHEAD, MOST_AHEAD, MOST_ASYNC, MOST_AT_ONCE
from django_pglock.worker.claiming.function_kinds import ASYNC, SYNC, Looks
from django_pglock.worker.in_flight import Ending, Hand

QUICK, SLOW = 1e-6, 1.0


def filled(count, *, threads=4, cost=QUICK):
    """Return what one process has in hand: so many claims, none of them begun."""
    hand = Hand(threads)
    hand.threads.expect_cost(cost)
    hand.take([SimpleNamespace(id=number, attempt=1, task_path="call") for number in range(count)])
    return hand


def begun(hand, count):
    """Let so many threads begin something, and return their slots with what they have begun."""
    return [(slot, hand.threads.next(slot)) for slot in hand.threads.slots[:count]]


def test_each_free_thread_gets_a_claim_and_long_ones_hoard_nothing():
    assert filled(0, cost=SLOW).threads.room() == 4
    assert filled(3, cost=SLOW).threads.room() == 1
    assert filled(4, cost=SLOW).threads.room() == 0
    hand = filled(4, cost=SLOW)
    begun(hand, 4)
    assert hand.threads.room() == 0


def test_before_a_cost_is_known_nothing_waits_for_a_thread():
    threads = Hand(2).threads
    assert threads.room() == 2
    threads.slots[0].began_at = time.monotonic()
    assert threads.room() == 1
    assert threads.next_change_in(0.0) == math.inf


def test_quick_tasks_are_claimed_in_few_large_bites():
    assert filled(0).threads.room() == MOST_AT_ONCE
    assert filled(2 + MOST_AHEAD // 2).threads.room() == MOST_AT_ONCE
    assert filled(3 + MOST_AHEAD // 2).threads.room() == 0


@pytest.mark.parametrize(
    ("running_for", "room"), [(0.2, 0), (0.4 - AHEAD * 1.5, 0), (0.4 - AHEAD / 2, 1), (0.4 + AHEAD / 2, 1), (1.0, 0)]
)
def test_the_next_long_task_is_claimed_shortly_before_its_thread_is_free(running_for, room, monkeypatch):
    """And not for one that takes longer than was expected: it may take any time."""
    hand = filled(1, threads=1, cost=0.4)
    [(slot, _)] = begun(hand, 1)
    monkeypatch.setattr(capacity, "time", SimpleNamespace(monotonic=lambda: slot.began_at + running_for))
    assert hand.threads.room() == room
    hand.take([SimpleNamespace(id=2, attempt=1, task_path="call")])
    assert hand.threads.room() == 0
    if running_for < 0.4 - AHEAD:
        assert hand.threads.next_change_in(slot.began_at) == pytest.approx(0.4 - AHEAD - running_for)
    else:
        assert hand.threads.next_change_in(slot.began_at) == 0, "expected since then"
        assert hand.threads.next_change_in(slot.began_at + running_for) == math.inf


def test_whoever_ends_a_task_asks_for_more_when_half_is_done():
    hand = filled(MOST_AHEAD // 2 + 3)
    (first, _), (second, _) = begun(hand, 2)
    assert not hand.hungry.is_set()
    hand.threads.free(first, cost=QUICK)
    assert not hand.hungry.is_set()
    hand.threads.next(first)
    hand.threads.free(second, cost=QUICK)
    assert hand.hungry.is_set()


def test_who_waits_for_the_database_hears_when_it_has_caught_up(monkeypatch):
    monkeypatch.setattr(module, "MOST_UNSETTLED", 1)
    hand = filled(3)
    endings = [Ending(claim, SUCCEEDED) for claim in hand.claims.values()]
    for ending in endings:
        hand.ended(ending)
    hand.hungry.clear()
    assert not hand.may_claim()
    hand.outbox.get(), hand.outbox.get(), hand.outbox.get()
    hand.let_go(endings)
    assert hand.hungry.is_set()
    assert hand.may_claim()
    hand.hungry.clear()
    hand.let_go([])
    assert not hand.hungry.is_set(), "nobody waits any more"


def test_a_long_task_among_quick_ones_is_felt_at_once():
    hand = filled(1)
    [(slot, _)] = begun(hand, 1)
    hand.threads.free(slot, cost=SLOW)
    assert hand.threads._ahead < MOST_AHEAD / 100
    for _ in range(1000):
        hand.threads._note_cost(QUICK)
    assert hand.threads._ahead == MOST_AHEAD
    assert hand.threads._cost < 4 * AHEAD / MOST_AHEAD


def test_coroutines_have_places_of_their_own(monkeypatch):
    monkeypatch.setattr(module.registry, "is_async", lambda path: path == "coroutine")
    hand = Hand(1)
    hand.take([SimpleNamespace(id=number, attempt=1, task_path="coroutine") for number in range(MOST_ASYNC)])
    assert (hand.threads.room(), hand.coroutines.room(), hand.waiting) == (1, 0, MOST_ASYNC)
    hand.coroutines.next()
    hand.coroutines.free()
    assert (hand.coroutines.room(), hand.coroutines.running, hand.hungry.is_set()) == (1, MOST_ASYNC - 1, True)
    assert hand.give_back() == MOST_ASYNC - 1
    assert (hand.coroutines.running, hand.coroutines.wait(0)) == (0, True)


def test_looks_for_the_event_loop_alone_keep_no_thread_waiting_for_long():
    now = [0.0]
    looks = Looks(clock=lambda: now[0])
    looks.note(SYNC, took=0.1, found=3)
    looks.note(ASYNC, took=0.1, found=3)
    assert (looks.next_in(SYNC), looks.next_in(ASYNC)) == (0, 0.4)
    looks.note(SYNC, took=0.1, found=0)
    assert looks.next_in(SYNC) == 0.05
    looks.note_news()
    assert (looks.next_in(SYNC), looks.next_in(ASYNC)) == (0, 0.4)


@pytest.mark.parametrize(("before", "after"), [((700, 11, 12), (GARBAGE, 11, 12)), ((10**6, 5, 5), (10**6, 5, 5))])
def test_python_looks_less_often_for_garbage_and_not_among_what_stays(before, after):
    was = gc.get_threshold()
    try:
        gc.set_threshold(*before)
        collect_garbage_less_often()
        assert gc.get_threshold() == after
        assert gc.get_freeze_count() > 10_000
        gc.set_threshold(0)
        collect_garbage_less_often()
        assert gc.get_threshold()[0] == 0, "somebody wanted it off"
    finally:
        gc.unfreeze()
        gc.set_threshold(*was)


@given(microseconds=st.integers(0, 8 * 10**15))
def test_no_microsecond_is_lost_in_seconds(microseconds):
    date = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=microseconds)
    assert date_of(float(f"{microseconds // 10**6}.{microseconds % 10**6:06}")) == date
