"""Rules that are taken out of the code one by one: a check that finds no fault is no check."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from django_pglock.store import admit, admit_one, bulk, claim, ready, release, settle
from django_pglock.store import schedules as ticks
from qa.interleavings.cases import Case
from qa.interleavings.schedules import schedules
from qa.interleavings.sessions import COMMIT, ROLL_BACK
from qa.interleavings.worlds import World, after, key, plain

pytestmark = pytest.mark.django_db(transaction=True)


@dataclass(frozen=True)
class Fault:
    """A rule that is taken out of the code, and a case in which that shows."""

    world: Callable[[World], None]
    case: Case
    said: str
    without: Callable[[pytest.MonkeyPatch], None]


def no_fence(monkeypatch):
    fence = re.compile(r"AND task.attempts = .*\n  AND task.status \|\| '' = 'RUNNING'")
    for name in ("SETTLE_SUCCESSES", "SETTLE_UNOBSERVED"):
        statement, count = fence.subn("", getattr(settle, name))
        assert count == 1
        monkeypatch.setattr(settle, name, statement)


def no_lock_of_the_key(monkeypatch):
    for module in (admit, admit_one):
        monkeypatch.setattr(module, "LOCK_KEY", "SELECT %s::text, {by_index}")


def no_wake_up(monkeypatch):
    monkeypatch.setattr(ready, "wake", lambda *values: None)


def no_count(monkeypatch):
    monkeypatch.setattr(release, "RELEASE", release.RELEASE.replace("task.waits_for - child.done", "task.waits_for"))


def no_row_lock(monkeypatch):
    monkeypatch.setattr(claim, "first_free", first)


def first(rows, limit=None, **options):
    """Select the rows as ``first_free`` does, and lock nothing."""
    rows = rows.only("pk")
    rows.query.set_annotation_mask(())
    return rows[:limit] if limit else rows


def no_transaction_around(module):
    """Return a fault: each statement is committed by itself."""

    def without(monkeypatch):
        monkeypatch.setattr(module, "transaction", SimpleNamespace(atomic=lambda **options: nullcontext()))

    without.__name__ = f"no_transaction_around_{module.__name__.rpartition('.')[2]}"
    return without


def no_look_at_the_date(monkeypatch):
    statement = ticks.TAKE_TICKS.replace("schedule.next_at = given.tick", "schedule.next_at IS NOT NULL")
    monkeypatch.setattr(ticks, "TAKE_TICKS", statement)


FAULTS = [
    Fault(plain, Case("plain", "rescue_claims", 1, COMMIT, ("settle_too_late",)), "was taken back", no_fence),
    Fault(
        key,
        Case("key", "enqueue_at_a_free_key", 1, COMMIT, ("enqueue_at_a_free_key",)),
        "too many have order:free",
        no_lock_of_the_key,
    ),
    Fault(plain, Case("plain", "promote_due", 1, COMMIT, ("enqueue_later",)), "nobody was woken", no_wake_up),
    Fault(plain, Case("plain", "claim_ready", 1, COMMIT, ("claim_ready",)), "was lost", no_row_lock),
    Fault(after, Case("after", "succeed", 1, COMMIT, ("report_progress",)), "does not wait for", no_count),
    Fault(schedules, Case("schedules", "tick", 1, COMMIT, ("tick",)), "enqueued", no_look_at_the_date),
    Fault(
        schedules,
        Case("schedules", "tick", 4, ROLL_BACK, ("disable",)),
        "passed without a task",
        no_transaction_around(ticks),
    ),
    Fault(
        plain,
        Case("plain", "redrive_failures", 1, COMMIT, ("give_back_lost_answers",)),
        "has not said so",
        no_transaction_around(bulk),
    ),
]


@pytest.mark.parametrize(
    ("runner", "fault"),
    [pytest.param(fault.world, fault, id=fault.without.__name__) for fault in FAULTS],
    indirect=["runner"],
)
def test_an_interleaving_test_fails_for_each_planted_fault(runner, fault, monkeypatch):
    """The same case passes with the rule in the code."""
    runner.run(fault.case)
    fault.without(monkeypatch)
    with pytest.raises(AssertionError, match=fault.said):
        runner.run(fault.case)
