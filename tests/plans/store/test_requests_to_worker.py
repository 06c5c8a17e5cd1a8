"""Requests to a worker are searched among the tasks that it runs; stacks go by the task's id."""

from __future__ import annotations

from django_pglock.store.requests_to_worker import ANSWER_STACK, REQUEST_STACK, REQUESTS, STACK
from django_pglock.store.statements import filled
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "REQUESTS": Call(filled(REQUESTS), ([backlog.worker],), by_index=True),
        "REQUEST_STACK": Call(filled(REQUEST_STACK), (backlog.ids[0],)),
        "ANSWER_STACK": Call(filled(ANSWER_STACK), ("", backlog.ids[0], 1, backlog.worker)),
        "STACK": Call(filled(STACK), (backlog.ids[0],)),
    }


def test_requests_to_a_worker_read_only_its_own_tasks(plans):
    plans.check()
