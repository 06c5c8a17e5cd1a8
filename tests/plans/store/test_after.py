"""Tasks that wait for others are enqueued, and wait again, beside a backlog."""

from __future__ import annotations

from django_pglock.store.after import ENQUEUE_AFTER, HAVE_DEPENDENCIES, LOCK_AWAITED, WAIT_AGAIN
from django_pglock.store.statements import filled
from tests.plans.reading import ROW
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "LOCK_AWAITED": Call(filled(LOCK_AWAITED), (f"{{{backlog.ids[0]}}}",)),
        "HAVE_DEPENDENCIES": Call(filled(HAVE_DEPENDENCIES), (f"{{{backlog.ids[0]}}}",)),
        "WAIT_AGAIN": Call(filled(WAIT_AGAIN), (f"{{{backlog.ids[0]}}}",)),
        "ENQUEUE_AFTER": Call(filled(ENQUEUE_AFTER), (backlog.array, *ROW, *[None] * 7, len(backlog.ids))),
    }


def test_awaited_tasks_are_found_by_their_ids(plans):
    plans.check()
