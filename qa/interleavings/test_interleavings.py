"""Every verb beside every other one on the same rows, and three verbs in random orders of their statements.

The short form runs each pair in one world, and of pairs that differ only in the caller's transaction every second one.
``PGLOCK_INTERLEAVINGS=all`` runs each pair in all worlds and in both orders, stops the first verb at each of its
statements, and takes many more random orders: more than half an hour of one core.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from qa.interleavings import worlds
from qa.interleavings.cases import Case, CaseRunner, Walk, pairs, walks
from qa.interleavings.families import family
from qa.interleavings.schedules import schedules
from qa.interleavings.sessions import COMMIT
from qa.interleavings.steps import steps
from qa.interleavings.verbs import VERBS
from qa.interleavings.waits import waits

IS_SHORT = os.environ.get("PGLOCK_INTERLEAVINGS") != "all"
WALKS = 20 if IS_SHORT else 2000
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(600 if IS_SHORT else 0)]
BUILDS = (*worlds.BUILDS, schedules, family, waits, steps)
in_world = pytest.mark.parametrize("runner", BUILDS, indirect=True, ids=lambda build: build.__name__)


def failures(runner: CaseRunner, cases: Iterator[Case | Walk]) -> list[str]:
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
    assert failures(runner, pairs(runner.world.name, runs, is_short=IS_SHORT)) == []
    assert runner.blocked, "the verbs do not meet"


@in_world
def test_no_order_of_their_statements_violates_an_invariant(runner):
    """Three verbs, each of which stops at each statement, with its transaction open."""
    found = failures(runner, walks(runner.world.name, [*runner.record_all()], WALKS))
    assert found == []
    assert runner.blocked, "the verbs do not meet"


@pytest.mark.parametrize("runner", [waits], indirect=True)
def test_an_event_and_a_task_that_begins_to_wait_do_not_miss_each_other(runner):
    """Each verb of waits beside each other one, stopped at each of its statements, also in the short form."""
    own = {name: run for name, run in runner.record_all().items() if VERBS[name].worlds == {"waits"}}
    assert failures(runner, pairs("waits", own, is_short=False)) == []


@pytest.mark.parametrize("runner", [schedules], indirect=True)
def test_registering_and_removing_schedules_do_not_deadlock(runner):
    """Both wait for the row of a tick. The one that gets the row must not wait for another row of the other."""
    for others in (("remove", "register_again"), ("register_again", "remove")):
        for stop_at in (3, 4):
            runner.run(Case("schedules", "tick", stop_at, COMMIT, others))
