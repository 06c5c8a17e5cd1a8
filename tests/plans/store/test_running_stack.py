"""The stack of a running task is asked for and answered by the id of the task."""

from __future__ import annotations

from django_pglock.store.running_stack import ANSWER_STACK, REQUEST_STACK
from django_pglock.store.statements import filled
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "REQUEST_STACK": Call(filled(REQUEST_STACK), (backlog.ids[0], 600.0, backlog.ids[0])),
        "ANSWER_STACK": Call(filled(ANSWER_STACK), ("", backlog.ids[0], 1, backlog.worker)),
    }


def test_the_task_is_found_by_its_id(plans):
    plans.check()
