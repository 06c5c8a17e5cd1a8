"""Pruning walks the key and the index of dates."""

from __future__ import annotations

import json

import pytest
from django.db import connection
from django.db.models.functions import Now

from django_pglock.models import Task
from django_pglock.store.prune import NEXT_WINDOW, expired, outdated, pruning_sql
from django_pglock.store.sql import filled
from tests.plans.reading import nodes, plan_of, reads

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("batch", [1, 500, 5000])
def test_pruning_walks_the_key_and_the_index_of_dates(history, batch):
    rows = Task.objects.all()
    Task.objects.filter(status="SUCCESSFUL", queue="q1").update(expires_at=Now(), keep_result=1)
    with connection.cursor() as cursor:
        cursor.execute(
            """INSERT INTO django_pglock_attempt
                      (task_id, number, started_at, finished_at, outcome, exception_path, traceback)
               SELECT id, 1, now(), now(), 'FAILED', '', '' FROM django_pglock_task"""
        )
        cursor.execute("ANALYZE django_pglock_task, django_pglock_attempt")
        cursor.execute("SELECT min(id) FROM django_pglock_task")
        [first] = cursor.fetchone()
    assert reads(plan_of(filled(NEXT_WINDOW), (0.0, first, batch))) == {("Index Scan", "django_pglock_task_pkey")}
    window = outdated(rows, {"SUCCESSFUL": 7, "FAILED": 30}).filter(pk__gt=first, pk__lte=first + batch)
    for selection, index in ((window, "django_pglock_task_pkey"), (expired(rows), "pglock_task_expires")):
        plan = plan_of(*pruning_sql(selection, batch))
        assert "Seq Scan" not in {kind for kind, _ in reads(plan)}, json.dumps(plan, indent=1)
        used = {each["Index Name"] for each in nodes(plan) if "Index Name" in each}
        assert used >= {index, "pglock_attempt_number"}
