"""Queues and functions of ready tasks are found by a probe each."""

from __future__ import annotations

from django_pglock.store.ready import READY_PATHS, READY_QUEUES
from django_pglock.store.statements import filled
from tests.plans.reading import BATCH
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "READY_QUEUES": Call(filled(READY_QUEUES), by_index=True),
        "READY_PATHS": Call(filled(READY_PATHS), (BATCH, BATCH)),
    }


def test_queues_and_functions_are_found_by_a_probe_each(plans):
    plans.check()
