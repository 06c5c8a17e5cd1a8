"""A claim in turns reads the first tasks of each tenant."""

from __future__ import annotations

from django_pglock.store.claim import CLAIM_FAIR
from django_pglock.store.statements import filled
from tests.plans.reading import BATCH, PATH
from tests.plans.store.backlog import Call

HERE = ("default", [PATH], None)


def calls(backlog):
    return {
        "CLAIM_FAIR": Call(
            filled(CLAIM_FAIR),
            ("", "default", *HERE, "default", BATCH, *HERE, BATCH, BATCH, backlog.worker, BATCH),
            by_index=True,
        ),
    }


def test_a_fair_claim_reads_only_the_first_task_of_each_tenant(plans):
    plans.check()
