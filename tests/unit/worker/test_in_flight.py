"""What is in flight: nothing new is claimed while too many outcomes wait for the database."""

from __future__ import annotations

from types import SimpleNamespace

from django_pglock.store.outcome import SUCCEEDED
from django_pglock.worker import in_flight as module
from django_pglock.worker.ended_claim import EndedClaim
from django_pglock.worker.in_flight import InFlight

QUICK, SLOW = 1e-6, 1.0


def filled(count, *, threads=4, cost=QUICK):
    """Return what one process has in flight: so many claims, none of them begun."""
    in_flight = InFlight(threads)
    in_flight.threads.expect_cost(cost)
    in_flight.begin_all([SimpleNamespace(id=number, attempt=1, task_path="call") for number in range(count)])
    return in_flight


def test_a_waiter_is_notified_when_the_database_has_caught_up(monkeypatch):
    monkeypatch.setattr(module, "MOST_UNSETTLED", 1)
    in_flight = filled(3)
    ended_claims = [EndedClaim(claim, SUCCEEDED) for claim in in_flight.claims.values()]
    for ended in ended_claims:
        in_flight.end(ended)
    in_flight.fetcher_wakeup.clear()
    assert not in_flight.may_claim()
    in_flight.outbox.get(), in_flight.outbox.get(), in_flight.outbox.get()
    in_flight.remove(ended_claims)
    assert in_flight.fetcher_wakeup.is_set()
    assert in_flight.may_claim()
    in_flight.fetcher_wakeup.clear()
    in_flight.remove([])
    assert not in_flight.fetcher_wakeup.is_set(), "nobody waits any more"


def test_outcomes_that_are_settled_while_the_number_is_read_hold_back_no_claim(monkeypatch):
    """The settler found no waiter shortly before, so it would not wake the fetcher."""
    monkeypatch.setattr(module, "MOST_UNSETTLED", 1)
    numbers = iter([3, 0])
    monkeypatch.setattr(InFlight, "unsettled", property(lambda self: next(numbers)))
    assert InFlight(1).may_claim()
