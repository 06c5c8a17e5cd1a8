"""Tasks that wait for others are enqueued, and wait again, beside a backlog."""

from __future__ import annotations

from django_pglock.store.after import HAVE_DEPENDENCIES, LOCK_AWAITED, WAIT_AGAIN, after_others
from django_pglock.store.statements import filled
from tests.plans.reading import CALL
from tests.plans.store.backlog import Call
from tests.sample import tasks


def calls(backlog):
    return {
        "LOCK_AWAITED": Call(filled(LOCK_AWAITED), (f"{{{backlog.ids[0]}}}",)),
        "HAVE_DEPENDENCIES": Call(filled(HAVE_DEPENDENCIES), (f"{{{backlog.ids[0]}}}",)),
        "WAIT_AGAIN": Call(filled(WAIT_AGAIN), (f"{{{backlog.ids[0]}}}",)),
        "ENQUEUE_AFTER": Call(after_others("default", tasks.nothing.using(after=backlog.ids), CALL, "{}")),
    }


def test_awaited_tasks_are_found_by_their_ids(plans):
    plans.check()
