"""A retry of many reads the rows of its window by the key, whatever else has failed."""

from __future__ import annotations

import json

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_pglock.models import Task
from django_pglock.store import operate
from django_pglock.store.marking import first_free, marking_sql
from django_pglock.store.operate import RETRY
from tests.plans.reading import analyze, insert, nodes, plan_of, reads
from tests.plans.store.backlog import Call


def calls(backlog):
    retried = RETRY.movable(Task.objects.filter(pk=backlog.first)).order_by("pk")
    changes = {"status": "READY", "finished_at": None}
    return {"of one": Call(*marking_sql(first_free(retried, 1000, no_key=True), changes, '"queue"'))}


def test_a_retry_of_one_reads_its_row(plans):
    plans.check()


@pytest.mark.django_db(transaction=True)
def test_a_retry_of_many_reads_its_window_by_the_key(new_table, monkeypatch):
    monkeypatch.setattr(operate, "WINDOW", 500)
    insert("SUCCESSFUL", 20_000)
    insert("FAILED", 1500)
    Task.objects.filter(status="FAILED", pk__in=Task.objects.order_by("-pk").values("pk")[:10]).update(
        unique_scope="UNFINISHED", unique_key="key"
    )
    analyze()
    with CaptureQueriesContext(connection) as queries:
        assert Task.objects.filter(status="FAILED").retry() == 1491
    statements = [each["sql"] for each in queries if '"django_pglock_task"' in each["sql"]][1:]
    assert len(statements) >= 6, "two statements for each of three windows"
    for sql in statements:
        plan = plan_of(sql)
        assert "Seq Scan" not in {kind for kind, _ in reads(plan)}, json.dumps(plan, indent=1)


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
