"""The reason why a task is not finished is found by its id."""

from __future__ import annotations

from django_pglock.store.statements import filled
from django_pglock.store.why_it_waits import WHY_UNFINISHED
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "WHY_UNFINISHED": Call(filled(WHY_UNFINISHED), (30.0, backlog.ids[0])),
    }


def test_the_reason_is_found_by_a_few_probes(plans):
    plans.check()
