"""What is in flight, with claims of real rows."""

from __future__ import annotations

from uuid import uuid4

import pytest

from django_pglock.models import Task
from django_pglock.store.claim import claim_statement, claims_of
from django_pglock.store.outcome import GivenBack
from django_pglock.store.settle import settle
from django_pglock.worker.in_flight import EndedClaim, InFlight

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_task_that_was_given_back_and_claimed_again_stays_in_flight():
    """Removing the old claim must not remove the new one, because the heartbeat would no longer list it."""
    # No worker runs here: its upkeep would rescue claims whose workers do not exist.
    in_flight = InFlight(threads=1)
    [old], [new] = list(_claims_of_one_task())
    in_flight.claims[old.id, old.attempt] = old
    in_flight.claims[new.id, new.attempt] = new
    in_flight.remove([EndedClaim(old, GivenBack())])
    assert in_flight.task_ids() == [new.id]
    in_flight.remove([EndedClaim(new, GivenBack())])


def _claims_of_one_task():
    row = Task.objects.create(queue="elsewhere", backend="default", task_path="nobody.knows")
    for _ in range(2):
        worker = uuid4()
        taken = claim_statement("default", worker=worker, paths=["nobody.knows"]).execute(1, "elsewhere")
        claims = claims_of(taken, worker)
        yield claims
        settle("default", [(claims[0], GivenBack())], worker)
    assert row.pk == claims[0].id
