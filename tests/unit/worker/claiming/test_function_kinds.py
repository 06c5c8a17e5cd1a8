"""The pauses between two polls for one kind of functions alone."""

from __future__ import annotations

from django_pglock.worker.claiming.function_kinds import ASYNC, SYNC, KindPauses


def test_polls_for_coroutines_alone_delay_no_thread_for_long():
    now = [0.0]
    looks = KindPauses(clock=lambda: now[0])
    looks.note(SYNC, took=0.1, found=3)
    looks.note(ASYNC, took=0.1, found=3)
    assert (looks.next_in(SYNC), looks.next_in(ASYNC)) == (0, 0.4)
    looks.note(SYNC, took=0.1, found=0)
    assert looks.next_in(SYNC) == 0.05
    looks.note_new_tasks()
    assert (looks.next_in(SYNC), looks.next_in(ASYNC)) == (0, 0.4)


def test_polls_without_coroutines_use_a_fiftieth_of_the_time():
    looks = KindPauses(clock=lambda: 0.0)
    for took, pause in ((0.01, 0.5), (0.05, 2.5), (0.4, 20.0), (1.0, 30.0)):
        looks.note(ASYNC, took=took, found=0)
        assert looks.next_in(ASYNC) == pause


def test_a_claim_that_finds_tasks_ends_the_pause_of_one_just_before_that_found_none():
    """One poll may claim from the queues that had ready tasks before, and then from the others."""
    looks = KindPauses(clock=lambda: 0.0)
    looks.note(SYNC, took=0.1, found=0)
    looks.note(SYNC, took=0.1, found=1)
    assert looks.next_in(SYNC) == 0
