"""Unique keys are looked up, freed and replaced by their index."""

from __future__ import annotations

from django_pglock.store.call import row_of
from django_pglock.store.statements import filled
from django_pglock.store.unique import FIND_AND_LOCK_UNIQUE, FIND_UNIQUE, FREE_EXPIRED_UNIQUE, REPLACE_UNIQUE
from tests.plans.reading import CALL
from tests.plans.store.backlog import Call
from tests.sample import tasks


def calls(backlog):
    return {
        "FIND_UNIQUE": Call(filled(FIND_UNIQUE), (["key 7"],)),
        "FIND_AND_LOCK_UNIQUE": Call(filled(FIND_AND_LOCK_UNIQUE), (["key 7"],)),
        "FREE_EXPIRED_UNIQUE": Call(filled(FREE_EXPIRED_UNIQUE), (["key 7"],)),
        "REPLACE_UNIQUE": Call(
            filled(REPLACE_UNIQUE),
            row_of(tasks.nothing, CALL._replace(unique="key 7"), "{}") | {"date": None, "delay": None},
        ),
    }


def test_the_task_with_a_unique_key_is_found_by_its_index(plans):
    plans.check()
