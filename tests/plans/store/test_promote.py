"""Promotion walks the index of dates."""

from __future__ import annotations

from django_pglock.models import Task
from django_pglock.store.marking import first_free, marking_sql
from django_pglock.store.ready import NEXT_DUE, due
from django_pglock.store.statements import filled
from tests.plans.reading import reads
from tests.plans.store.backlog import Call


def calls(_backlog):
    promotion = marking_sql(first_free(due(Task.objects.all()), 1000, no_key=True), {"status": "READY"}, '"queue"')
    return {"promotion": Call(*promotion, by_index=True), "NEXT_DUE": Call(filled(NEXT_DUE), by_index=True)}


def test_promotion_walks_the_index_of_dates(plans):
    plans.check()
    for plan in plans.values():
        assert "pglock_task_due" in {index for _, index in reads(plan)}
