"""A task with thousands of dependents promotes them in batches."""

from __future__ import annotations

import pytest
from django.db import connection

from django_pglock.models import Task, Waiter
from django_pglock.store.release import (
    AWAITED,
    AWAITED_BETWEEN,
    ORPHANED_WAITERS,
    RELEASE,
    RELEASE_UNLOCKED,
    RELEASED_AT_ONCE,
    release,
)
from django_pglock.store.statements import array_of_numbers, filled
from tests.plans.reading import BATCH, comparisons, executed, insert
from tests.plans.store.backlog import Call


def calls(backlog):
    ids, one = backlog.ids, f"{{{backlog.ids[0]}}}"
    return {
        "AWAITED_BETWEEN": Call(filled(AWAITED_BETWEEN), (ids[0], ids[-1], 2 * len(ids))),
        "AWAITED": Call(filled(AWAITED), [one]),
        "RELEASE": Call(filled(RELEASE), (one, BATCH, "x", "%s", "done")),
        "RELEASE_UNLOCKED": Call(filled(RELEASE_UNLOCKED), (one, BATCH, "x", "%s", "done")),
        "RELEASE of several": Call(filled(RELEASE), (array_of_numbers(backlog.awaited), BATCH, "x", "%s", "done")),
        "ORPHANED_WAITERS": Call(filled(ORPHANED_WAITERS), (0, BATCH)),
    }


def test_tasks_that_wait_are_found_by_what_they_wait_for(plans):
    plans.check()


@pytest.mark.django_db
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
