"""Rules that are taken out of the code one by one: a check that finds no fault is no check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from django_pglock.store import admit, claim, insert_at_key, promote, release, settle
from tests.interleavings.cases import Case
from tests.interleavings.stage import COMMIT
from tests.interleavings.worlds import World, after, key, plain

pytestmark = pytest.mark.django_db(transaction=True)


@dataclass(frozen=True)
class Fault:
    """A rule that is taken out of the code, and a case in which that shows."""

    world: Callable[[World], None]
    case: Case
    said: str
    without: Callable[[pytest.MonkeyPatch], None]


def no_fence(monkeypatch):
    fence = "AND task.attempts = outcome.attempt AND task.status = 'RUNNING'"
    monkeypatch.setattr(settle, "SETTLE_SUCCESSES", settle.SETTLE_SUCCESSES.replace(fence, ""))


def no_lock_of_the_key(monkeypatch):
    for module in (admit, insert_at_key):
        monkeypatch.setattr(module, "LOCK_KEY", "SELECT %s::text, {by_index}")


def no_wake_up(monkeypatch):
    monkeypatch.setattr(promote, "wake", lambda *values: None)


def no_count(monkeypatch):
    monkeypatch.setattr(release, "RELEASE", release.RELEASE.replace("task.waits_for - child.done", "task.waits_for"))


def no_row_lock(monkeypatch):
    def first(rows, limit, **options):
        rows = rows.only("pk")
        rows.query.set_annotation_mask(())
        return rows[:limit]

    monkeypatch.setattr(claim, "first_free", first)


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
]


@pytest.mark.parametrize(
    ("company", "fault"),
    [pytest.param(fault.world, fault, id=fault.without.__name__) for fault in FAULTS],
    indirect=["company"],
)
def test_a_fault_is_found(company, fault, monkeypatch):
    """The same case passes with the rule."""
    company.play(fault.case)
    fault.without(monkeypatch)
    with pytest.raises(AssertionError, match=fault.said):
        company.play(fault.case)
