"""The statuses of the last runs of schedules are found by their ids."""

from __future__ import annotations

from django_pglock.store.schedule_status import LAST_STATUSES
from django_pglock.store.statements import filled
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "LAST_STATUSES": Call(filled(LAST_STATUSES), [backlog.array]),
    }


def test_tasks_are_found_by_their_ids(plans):
    plans.check()
