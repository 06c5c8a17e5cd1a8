"""The runs of a schedule are found one from the other, by their ids."""

from __future__ import annotations

from django_pglock.store.schedule_runs import SCHEDULE_RUNS
from django_pglock.store.statements import filled
from tests.plans.reading import BATCH, PATH
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "SCHEDULE_RUNS": Call(filled(SCHEDULE_RUNS), (backlog.ids[-1], PATH, PATH, BATCH)),
    }


def test_each_run_is_found_by_the_id_that_the_next_one_has(plans):
    plans.check()
