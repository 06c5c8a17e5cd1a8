"""How many tasks a process asks for: enough for its threads, few claims for many tasks, nothing that is hoarded."""

from __future__ import annotations

import gc
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_pglock.management.commands.runlockworker import GARBAGE, look_less_for_garbage
from django_pglock.tasks.claim import date_of
from django_pglock.tasks.outcome import SUCCEEDED
from django_pglock.worker import hand as module
from django_pglock.worker.hand import AHEAD, MOST_AHEAD, MOST_AT_ONCE, Ending, Hand

QUICK, SLOW = 1e-6, 1.0


def filled(count, *, threads=4, cost=QUICK):
    hand = Hand(threads)
    hand.expect_cost(cost)
    hand.take([SimpleNamespace(id=number, attempt=1) for number in range(count)])
    return hand


def test_a_free_thread_is_not_kept_waiting_by_tasks_that_others_are_about_to_take():
    assert filled(0, cost=SLOW).room() == 4
    assert filled(3, cost=SLOW).room() == 1
    assert filled(4, cost=SLOW).room() == 0


def test_quick_tasks_are_claimed_in_few_large_bites():
    assert filled(0).room() == MOST_AT_ONCE
    assert filled(4 + MOST_AHEAD // 2).room() == MOST_AT_ONCE
    assert filled(5 + MOST_AHEAD // 2).room() == 0


def test_whoever_ends_a_task_asks_for_more_when_half_is_done():
    hand = filled(MOST_AHEAD // 2 + 2)
    claims = [hand.inbox.get() for _ in range(2)]
    hand.inbox.put(claims[0])
    hand.ended(Ending(claims[1], SUCCEEDED), QUICK)
    assert not hand.hungry.is_set()
    hand.inbox.get()
    hand.ended(Ending(claims[0], SUCCEEDED), QUICK)
    assert hand.hungry.is_set()


def test_who_waits_for_the_database_hears_when_it_has_caught_up(monkeypatch):
    monkeypatch.setattr(module, "MOST_UNSETTLED", 1)
    hand = filled(3)
    endings = [Ending(hand.inbox.get(), SUCCEEDED) for _ in range(3)]
    for ending in endings:
        hand.ended(ending, QUICK)
    hand.hungry.clear()
    assert hand.room() == 0
    hand.outbox.get(), hand.outbox.get(), hand.outbox.get()
    hand.let_go(endings)
    assert hand.hungry.is_set()
    hand.hungry.clear()
    hand.let_go([])
    assert not hand.hungry.is_set(), "nobody waits any more"


def test_a_long_task_among_quick_ones_is_felt_at_once():
    hand = filled(1)
    hand.ended(Ending(hand.inbox.get(), SUCCEEDED), SLOW)
    assert hand._ahead < MOST_AHEAD / 100
    for _ in range(1000):
        hand._note_cost(QUICK)
    assert hand._ahead == MOST_AHEAD
    assert hand._cost < 4 * AHEAD / MOST_AHEAD


@pytest.mark.parametrize(("before", "after"), [((700, 11, 12), (GARBAGE, 11, 12)), ((10**6, 5, 5), (10**6, 5, 5))])
def test_python_looks_less_often_for_garbage_and_not_among_what_stays(before, after):
    was = gc.get_threshold()
    try:
        gc.set_threshold(*before)
        look_less_for_garbage()
        assert gc.get_threshold() == after
        assert gc.get_freeze_count() > 10_000
        gc.set_threshold(0)
        look_less_for_garbage()
        assert gc.get_threshold()[0] == 0, "somebody wanted it off"
    finally:
        gc.unfreeze()
        gc.set_threshold(*was)


@given(microseconds=st.integers(0, 8 * 10**15))
def test_no_microsecond_is_lost_in_seconds(microseconds):
    date = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=microseconds)
    assert date_of(float(f"{microseconds // 10**6}.{microseconds % 10**6:06}")) == date
