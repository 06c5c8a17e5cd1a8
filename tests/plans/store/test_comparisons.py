"""Joins of a batch with itself: the planner expects few rows and chooses a nested loop that compares each pair."""

from __future__ import annotations

import json
import math
from uuid import uuid4

import pytest
from django.db import connection

from django_pglock.models import Task, Waiter
from django_pglock.store.operate import RETRY
from django_pglock.store.release import (
    RELEASE,
    RELEASED_AT_ONCE,
    release,
)
from django_pglock.store.requests_to_worker import WRITE_PROGRESS
from django_pglock.store.rescue import RESCUE, RESCUED_AT_ONCE, rescue
from django_pglock.store.statements import filled
from tests.plans.reading import analyze, comparisons, executed, insert, nodes, plan_of

pytestmark = pytest.mark.django_db


def test_progress_is_written_with_few_comparisons_of_rows(new_table):
    """The planner expects few rows, and chooses a nested loop that compares each pair."""
    analyze()
    insert("RUNNING", 1000, worker=uuid4())
    ids = list(Task.objects.order_by("pk").values_list("pk", flat=True))[:200]
    plan = executed(filled(WRITE_PROGRESS), (ids, [1] * len(ids), ["null"] * len(ids)))
    assert comparisons(plan) <= 100_000


def test_thousands_of_dependents_are_promoted_in_batches(new_table):
    """The planner expects one child and chooses a nested loop: with all rows at once, millions of comparisons."""
    insert("SUCCESSFUL", 1)
    awaited = Task.objects.get()
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE django_pglock_waiter")
        cursor.execute("INSERT INTO django_pglock_waiter (awaited) VALUES (0)")
        cursor.execute("ANALYZE django_pglock_task, django_pglock_waiter")
        cursor.execute(
            """INSERT INTO django_pglock_task (status, queue, task_path, backend, waits_for)
               SELECT 'BLOCKED', 'default', 'tests.sample.tasks.nothing', 'default', 1 FROM generate_series(1, 2000)"""
        )
        cursor.execute(
            """INSERT INTO django_pglock_waiter (awaited, task_id)
               SELECT %s, id FROM django_pglock_task WHERE waits_for = 1 UNION ALL SELECT %s, NULL""",
            [awaited.pk, awaited.pk],
        )
    values = (f"{{{awaited.pk}}}", RELEASED_AT_ONCE, "x", "%s", "done")
    plan = executed(filled(RELEASE), values)
    assert comparisons(plan) <= 2 * RELEASED_AT_ONCE**2, "waiters with ended tasks, and with waiting tasks"
    assert release("default", [awaited.pk]) == 2000
    assert set(Task.objects.filter(waits_for=0).values_list("status")) == {("READY",), ("SUCCESSFUL",)}
    assert Waiter.objects.count() == 1, "the process was told, too; only the stranger is left"


def test_tasks_of_a_dead_worker_are_compared_some_at_a_time(new_table):
    """The planner expects few tasks. For a thousand tasks of a dead worker it made a million comparisons."""
    analyze()
    insert("RUNNING", 1000, worker=uuid4())
    values = (3600.0, 3600.0, 3600.0, RESCUED_AT_ONCE, RESCUED_AT_ONCE, 3, "x", "x", "y")
    assert comparisons(executed(filled(RESCUE), values, by_index=True)) <= 100_000
    assert [len(rescue("default", unbroken=math.inf)) for _ in range(6)] == [RESCUED_AT_ONCE] * 5 + [0]


@pytest.mark.django_db(transaction=True)
def test_unique_tasks_that_have_succeeded_are_not_compared_with_those_to_retry(new_table):
    """Each of 100,000 failed tasks was compared with a history of 300,000 unique tasks, for minutes."""
    insert("SUCCESSFUL", 20_000)
    insert("FAILED", 500)
    analyze()
    with connection.cursor() as cursor:
        # As many keys as fit into the memory are hashed.
        cursor.execute("SET work_mem = '64kB'")
        sql, values = RETRY.movable(Task.objects.all()).values("pk").query.sql_with_params()
        plan = plan_of(sql, values)
        cursor.execute("RESET work_mem")
    assert "Materialize" not in {node["Node Type"] for node in nodes(plan)}, json.dumps(plan, indent=1)
