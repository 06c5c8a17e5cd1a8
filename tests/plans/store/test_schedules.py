"""The runs of a schedule are found one from the other, and the statuses of the last ones, by their ids."""

from __future__ import annotations

from django_pglock.store.schedules import LAST_STATUSES, SCHEDULE_RUNS
from django_pglock.store.statements import filled
from tests.plans.reading import BATCH, PATH
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "LAST_STATUSES": Call(filled(LAST_STATUSES), [backlog.array]),
        "SCHEDULE_RUNS": Call(filled(SCHEDULE_RUNS), (backlog.ids[-1], PATH, PATH, BATCH)),
    }


def test_the_runs_of_schedules_are_found_by_their_ids(plans):
    plans.check()
