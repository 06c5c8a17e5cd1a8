"""Tasks that processes wait for are found by their ids."""

from __future__ import annotations

from django_pglock.store.result_waiters import FIND_ENDED, NOTE_WAITS
from django_pglock.store.statements import filled
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "NOTE_WAITS": Call(filled(NOTE_WAITS), [f"{{{backlog.ids[0]}}}"] * 2),
        "FIND_ENDED": Call(filled(FIND_ENDED), [backlog.array]),
    }


def test_tasks_are_found_by_their_ids(plans):
    plans.check()
