"""Statements that join, beside tables whose rows had all been deleted before the last ANALYZE.

Then the planner expects one row in each table, however many rows come (``django_pglock/store/statements.py``).
``tests/plans/store`` has the other statements.
"""

from __future__ import annotations

import pytest
from django.urls import reverse

from django_pglock.admin.task_page import waiting_for
from django_pglock.models import Task
from django_pglock.store.marking import first_free, marking_sql
from django_pglock.store.prune import _count, expired, outdated, prune_window
from django_pglock.store.statements import run
from django_pglock.store.wake import STILL_READY
from tests.plans.reading import comparisons, delete_all, executed, insert
from tests.plans.store.backlog import ATTEMPTS, TABLES
from tests.sample.models import Rack
from tests.sql import execute_sql

#: Tasks of each kind.
MANY = 2000
#: The rows of tables and the entries of indexes that this transaction has read so far.
READ = """
SELECT sum(pg_stat_get_xact_tuples_returned(oid))::bigint FROM pg_class
WHERE relkind IN ('r', 'i') AND relname ~ '^(django_pglock|pglock|refers|sample_rack)'
"""
RACKS = """
INSERT INTO sample_rack (aisle, number, status)
SELECT 'aisle ' || n % 100, n, CASE WHEN n % 10 = 0 THEN 'new' ELSE 'used' END FROM generate_series(1, 2000) AS n
"""


def rows_read_by(action):
    [(before,)] = execute_sql(READ)
    action()
    [(after,)] = execute_sql(READ)
    return after - before


@pytest.fixture
def emptied(new_table, django_user_model):
    """Thousands of tasks, attempts and waiters, and rows of the project that refer to tasks, since the last ANALYZE."""
    execute_sql("CREATE TABLE refers (task bigint REFERENCES django_pglock_task (id))")
    execute_sql("CREATE INDEX ON refers (task)")
    for is_emptied in (True, False):
        insert("SUCCESSFUL", MANY)
        insert("FAILED", MANY)
        execute_sql(ATTEMPTS)
        execute_sql("INSERT INTO django_pglock_waiter (awaited, task_id) SELECT id + 10000, id FROM django_pglock_task")
        execute_sql(f"INSERT INTO refers SELECT id FROM django_pglock_task ORDER BY id LIMIT {MANY // 2}")
        execute_sql(RACKS)
        if is_emptied:
            delete_all(*TABLES, "refers", "sample_rack")
    insert("READY", MANY)


def test_pruning_looks_up_what_refers_to_a_task(emptied):
    """``PRUNE`` deletes what the statement before it has locked."""
    first = Task.objects.earliest("pk").pk
    assert rows_read_by(lambda: prune_window("default", first - 1, {"SUCCESSFUL": 0}, batch=200)) < 5000


def test_a_dry_run_looks_up_what_refers_to_a_task(emptied):
    tasks = Task.objects.all()
    assert outdated(tasks, {"SUCCESSFUL": 0}).count() == MANY // 2
    assert rows_read_by(lambda: _count(tasks, expired(tasks), {"SUCCESSFUL": 0})) < 10 * MANY


def test_the_tasks_with_an_exception_are_found_by_their_attempts(emptied, admin_client):
    address = reverse("admin:django_pglock_task_changelist")
    for exception in ("x", "nothing"):
        assert (
            rows_read_by(lambda exception=exception: admin_client.get(f"{address}?exception={exception}")) < 20 * MANY
        )


def test_ready_tasks_of_a_queue_are_looked_for_by_a_probe(emptied):
    assert rows_read_by(lambda: run("default", STILL_READY, ["default", "empty"])) < 10


def test_the_page_of_a_task_reads_a_few_of_those_that_wait_for_it(emptied):
    task = Task.objects.latest("pk")
    execute_sql(f"UPDATE django_pglock_waiter SET awaited = {task.pk}")
    assert len(waiting_for(task)) > 1
    assert rows_read_by(lambda: waiting_for(task)) < 50


def test_claimed_rows_with_a_composite_key_are_found_by_the_first_column(emptied):
    racks = Rack.objects.filter(status="new").order_by("number")
    marking = marking_sql(first_free(racks, 200), {"status": "taken"}, "number")
    assert comparisons(executed(*marking)) <= 200**2
