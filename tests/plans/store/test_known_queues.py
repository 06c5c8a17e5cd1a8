"""Queues are found by a few index probes each, or from what a worker has counted."""

from __future__ import annotations

from django_pglock.store.known_queues import COMMON_QUEUES, COUNTED_QUEUES, KNOWN_QUEUES
from django_pglock.store.statements import filled
from tests.plans.reading import BATCH
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "KNOWN_QUEUES": Call(filled(KNOWN_QUEUES), (BATCH, ["default"]), by_index=True),
        "COUNTED_QUEUES": Call(filled(COUNTED_QUEUES), (60.0, 30.0, ["default"])),
        "COMMON_QUEUES": Call(filled(COMMON_QUEUES)),
    }


def test_queues_are_found_by_a_few_probes(plans):
    plans.check()
