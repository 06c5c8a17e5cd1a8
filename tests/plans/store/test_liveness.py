"""Workers that are dead are deleted unless they have running tasks, which an index has."""

from __future__ import annotations

from django_pglock.store.liveness import DELETE_DEAD
from django_pglock.store.statements import filled
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "DELETE_DEAD": Call(filled(DELETE_DEAD), (4.5, 5.25, 30.0), by_index=True),
        "DELETE_DEAD, if all are silent": Call(filled(DELETE_DEAD), (1e6, 0.0, 0.0), by_index=True),
    }


def test_running_tasks_of_the_dead_are_found_by_index(plans):
    plans.check()
