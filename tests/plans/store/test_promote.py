"""Promotion walks the index of dates."""

from __future__ import annotations

import pytest

from django_pglock.models import Task
from django_pglock.store.marking import first_free, marking_sql
from django_pglock.store.promote import due
from tests.plans.reading import plan_of, reads

pytestmark = pytest.mark.django_db


def test_promotion_walks_the_due_index(history):
    sql, params = marking_sql(first_free(due(Task.objects.all()), 1000, no_key=True), {"status": "READY"}, '"queue"')
    assert "pglock_task_due" in {index for _, index in reads(plan_of(sql, params))}
