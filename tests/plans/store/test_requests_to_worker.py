"""Requests to a worker are searched among the tasks that it runs."""

from __future__ import annotations

from django_pglock.store.requests_to_worker import CANCEL_REQUESTS, REQUESTS
from django_pglock.store.statements import filled
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "REQUESTS": Call(filled(REQUESTS), [backlog.worker] * 3, by_index=True),
        "CANCEL_REQUESTS": Call(filled(CANCEL_REQUESTS), [backlog.worker] * 2, by_index=True),
    }


def test_requests_to_a_worker_read_only_its_own_tasks(plans):
    plans.check()
