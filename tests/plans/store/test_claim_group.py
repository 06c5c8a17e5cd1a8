"""A claim of a group reads the first waiting tasks of its key."""

from __future__ import annotations

from django_pglock.store.claim import CLAIM_GROUP, CLAIM_GROUP_IN_KEY_ORDER
from django_pglock.store.statements import filled
from tests.plans.reading import BATCH, PATH
from tests.plans.store.backlog import Call

KEY = ("backlog", "backlog")


def calls(backlog):
    first = backlog.ids[0]
    return {
        "CLAIM_GROUP": Call(
            filled(CLAIM_GROUP),
            (first, 1, *KEY, PATH, BATCH, *KEY, PATH, 0.0, BATCH, BATCH, backlog.worker),
            by_index=True,
        ),
        "CLAIM_GROUP_IN_KEY_ORDER": Call(
            filled(CLAIM_GROUP_IN_KEY_ORDER),
            (first, 1, *KEY, BATCH, *KEY, 0.0, BATCH, BATCH, backlog.worker),
            by_index=True,
        ),
    }


def test_a_claim_of_a_group_reads_the_first_of_its_key(plans):
    plans.check()
