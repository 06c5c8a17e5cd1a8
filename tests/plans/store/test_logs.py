"""The log of an attempt is written into rows that are found by their ids."""

from __future__ import annotations

from django_pglock.store.logs import WRITE_LOGS
from django_pglock.store.statements import filled
from tests.plans.store.backlog import Call


def calls(backlog):
    return {
        "WRITE_LOGS": Call(filled(WRITE_LOGS), (backlog.ids, backlog.ones, backlog.texts)),
    }


def test_rows_are_found_by_their_ids(plans):
    plans.check()
