"""The id above all tasks that have succeeded is found by the primary key."""

from __future__ import annotations

from django_pglock.store.id_range import ABOVE_SUCCEEDED
from django_pglock.store.statements import filled
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "ABOVE_SUCCEEDED": Call(filled(ABOVE_SUCCEEDED)),
    }


def test_the_range_is_found_by_a_few_probes(plans):
    plans.check()
