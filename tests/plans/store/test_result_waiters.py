"""Tasks that processes wait for are found by their ids."""

from __future__ import annotations

from django_pglock.store.release import FIND_ENDED, WRITE_WAITERS
from django_pglock.store.statements import filled
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "WRITE_WAITERS": Call(filled(WRITE_WAITERS), [f"{{{backlog.ids[0]}}}"] * 2),
        "FIND_ENDED": Call(filled(FIND_ENDED), [backlog.array]),
    }


def test_tasks_are_found_by_their_ids(plans):
    plans.check()
