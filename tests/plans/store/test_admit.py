"""Admission reads only the first tasks of a key, beside any backlog."""

from __future__ import annotations

from django_pglock.store.admit import ADMIT, ADMIT_NEXT
from django_pglock.store.admit_one import admit_statement, enqueue_statement
from django_pglock.store.statements import filled
from tests.plans.reading import BATCH, CALL, scans_by_key
from tests.plans.store.backlog import Call
from tests.sample import keyed_tasks as keyed


def calls(backlog):
    first = backlog.ids[0]
    return {
        "ADMIT": Call(filled(ADMIT), (["backlog"],), by_index=True),
        "ADMIT, with tasks of the key for later": Call(filled(ADMIT), (["for later"],), by_index=True),
        "ADMIT, behind tasks that wait for others": Call(filled(ADMIT), (["after others"],), by_index=True),
        "ADMIT_NEXT": Call(filled(ADMIT_NEXT), (["backlog"],), by_index=True),
        "ADMIT_NEXT to several": Call(filled(ADMIT_NEXT), (["backlog", "other"],), by_index=True),
        "enqueueing at a key": Call(enqueue_statement("default", keyed.step, CALL, "{}"), by_index=True),
        "admitting one": Call(admit_statement("default", keyed.step, first, "backlog"), by_index=True),
    }


def test_admission_reads_neither_the_backlog_nor_later_tasks_nor_other_buckets(plans):
    """With statistics that have no buckets, the planner read all keys with a bucket before this one."""
    plans.check(rows=20 * BATCH, pages=400)


def test_admission_to_one_key_reads_the_index_of_keys(plans):
    """``ADMIT_NEXT`` reads the first waiting task of the key, and whether another one is admitted."""
    assert scans_by_key(plans["ADMIT_NEXT"]) == [2, 4]
    assert scans_by_key(plans["enqueueing at a key"]) == [1, 1]
    assert scans_by_key(plans["admitting one"]) == [1, 2]
