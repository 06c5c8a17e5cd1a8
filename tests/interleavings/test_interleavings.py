"""Every verb beside every other one on the same rows, and three verbs at the same keys.

The short form plays each pair once, in some thousand cases. ``PGLOCK_INTERLEAVINGS=all`` plays each pair in both orders
and stops the first verb at each of its statements: 75,000 cases, about half an hour of one core.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pkgutil import iter_modules

import pytest

from django_pglock import store
from tests.interleavings import workers
from tests.interleavings.cases import Case, Company, pairs, triples
from tests.interleavings.verbs import VERBS
from tests.interleavings.worlds import BUILDS

IS_SHORT = os.environ.get("PGLOCK_INTERLEAVINGS") != "all"
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(600 if IS_SHORT else 0)]
in_world = pytest.mark.parametrize("company", BUILDS, indirect=True, ids=lambda build: build.__name__)


def failures(company: Company, cases: Iterator[Case]) -> list[str]:
    """Play the cases; return what has failed."""
    found = []
    for case in cases:
        try:
            company.play(case)
        except AssertionError as error:
            found.append(f"{case}: {error}")
    return found


@in_world
def test_no_interleaving_breaks_a_law(company):
    """None has what another has, nobody waits in vain, nobody deadlocks, and who sleeps is woken."""
    turns = company.rehearse_all()
    name = company.world.name
    assert failures(company, pairs(name, turns, is_short=IS_SHORT)) == []
    assert failures(company, triples(name, turns, is_short=IS_SHORT)) == []
    assert company.blocked, "the verbs do not meet"


#: Each file of ``store/`` that changes rows of tasks, and the verbs that stand for it.
FILES = {
    "admit": {"sweep", "open_buckets"},
    "after": {"enqueue_after", "enqueue_several_after"},
    "cancel": {"cancel", "cancel_in_a_transaction"},
    "claim": {"claim_ready"},
    "claim_fair": {"claim_in_turns"},
    "claim_group": {"claim_ready"},
    "claim_manager": {"hold_rows"},
    "discard": {"discard", "discard_in_a_transaction"},
    "enqueue": {"enqueue", "enqueue_in_a_transaction"},
    "give_back": {"give_back_lost_answers"},
    "history": {"write_history", "write_history_backwards"},
    "insert": {"enqueue", "enqueue_later", "enqueue_several"},
    "insert_at_key": {"enqueue_at_a_key", "enqueue_at_a_rate"},
    "liveness": {"beat", "forget_workers"},
    "pause": {"pause", "pause_and_resume"},
    "progress": {"report_progress"},
    "promote": {"promote_due"},
    "prune": {"prune", "prune_a_window"},
    "rate": {"open_buckets", "forget_buckets"},
    "redrive": {"retry_in_a_transaction"},
    "release": {"succeed", "sweep"},
    "rescue": {"rescue_claims"},
    "reset_stuck": {"reset_stuck"},
    "retry": {"retry", "retry_in_a_transaction"},
    "run_now": {"run_now"},
    "settle": {*workers.OUTCOMES, "settle_too_late", "succeed_atomically"},
    "shared_counts": {"count_for_all"},
    "unique": {"enqueue_while_waiting", "take_the_place_of_another", "enqueue_several_unique"},
    "wait": {"wait_for_results"},
}
#: Files that change nothing, or that others use to change something; and tables that share no row with those of tasks.
NO_VERB = {
    *(
        "after_commit",
        "await_end",
        "call",
        "claim_columns",
        "count",
        "failures",
        "histogram",
        "id_range",
        "known_queues",
        "lock_keys",
        "logs",
        "managers",
        "marking",
        "move",
    ),
    *("outcome", "plans", "ready", "requests", "result", "result_listener", "sql", "unknown", "wake", "why_unfinished"),
    *("capture", "schedule", "schedule_runs", "stacks", "transition"),
}


def test_every_file_of_the_store_has_its_verbs():
    assert {module.name for module in iter_modules(store.__path__)} == FILES.keys() | NO_VERB
    assert set().union(*FILES.values()) <= VERBS.keys()
