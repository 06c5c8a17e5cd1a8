"""Lock keys, and the tasks that hold one, are found by the index of keys."""

from __future__ import annotations

from django_pglock.store.admit import BLOCKED_KEYS, HOLDERS
from django_pglock.store.statements import filled
from tests.plans.reading import BATCH
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "BLOCKED_KEYS": Call(filled(BLOCKED_KEYS), ("", 1000), by_index=True),
        "HOLDERS": Call(filled(HOLDERS), ("backlog", "backlog", BATCH)),
    }


def test_keys_are_found_by_a_probe_each(plans):
    plans.check()
