"""Every verb beside every other one on the same rows, and three verbs at the same keys, ticks, changes and rows.

The short form runs each pair in one world, and of pairs that differ only in the caller's transaction every second one,
in a thousand cases. ``PGLOCK_INTERLEAVINGS=all`` runs each pair in all worlds and in both orders, and stops the first
verb at each of its statements: 82,000 cases, more than half an hour of one core.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import combinations_with_replacement

import pytest

from qa.interleavings import sessions, worlds
from qa.interleavings.cases import Case, CaseRunner, is_worlds_turn, pairs, triples
from qa.interleavings.schedules import schedules
from qa.interleavings.sessions import COMMIT, SessionThread
from qa.interleavings.verbs import VERBS

IS_SHORT = os.environ.get("PGLOCK_INTERLEAVINGS") != "all"
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(600 if IS_SHORT else 0)]
BUILDS = (*worlds.BUILDS, schedules)
RESCUE_BEFORE_SETTLE = Case("plain", "rescue_claims", 1, COMMIT, ("settle_too_late",))
in_world = pytest.mark.parametrize("runner", BUILDS, indirect=True, ids=lambda build: build.__name__)


def failures(runner: CaseRunner, cases: Iterator[Case]) -> list[str]:
    """Run the cases; return what has failed."""
    found = []
    for case in cases:
        try:
            runner.run(case)
        except AssertionError as error:
            found.append(f"{case}: {error}")
            runner.replace_sessions()
    return found


@in_world
def test_no_interleaving_of_the_verbs_violates_an_invariant(runner):
    """No task is claimed twice, none waits forever, nothing deadlocks, and sleeping workers are woken."""
    runs = runner.record_all()
    name = runner.world.name
    assert failures(runner, pairs(name, runs, is_short=IS_SHORT)) == []
    assert failures(runner, triples(name, runs, is_short=IS_SHORT)) == []
    assert runner.blocked, "the verbs do not meet"


@pytest.mark.parametrize("runner", [schedules], indirect=True)
def test_registering_and_removing_schedules_do_not_deadlock(runner):
    """Both wait for the row of a tick. The one that gets the row must not wait for another row of the other."""
    for others in (("remove", "register_again"), ("register_again", "remove")):
        for stop_at in (3, 4):
            runner.run(Case("schedules", "tick", stop_at, COMMIT, others))


@pytest.mark.parametrize("runner", [worlds.plain], indirect=True)
def test_a_case_that_fails_while_its_sessions_are_stopped_does_not_affect_the_next_one(runner, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sessions, "NEVER", 0.5)
        patch.setattr(SessionThread, "_is_blocked", lambda self: False)
        patch.setattr(SessionThread, "_polls_for_lock", lambda self, before: False)
        [failure] = failures(runner, iter([RESCUE_BEFORE_SETTLE]))
    assert "neither ended nor blocked" in failure
    assert failures(runner, iter([RESCUE_BEFORE_SETTLE])) == []


def test_the_short_form_tests_every_pair_of_verbs_in_some_world():
    for first, second in combinations_with_replacement(VERBS.values(), 2):
        worlds = first.worlds & second.worlds
        assert not worlds or any(is_worlds_turn(world, first.name, second.name) for world in worlds)
