"""A retry of many reads the rows of its window by the key, whatever else has failed."""

from __future__ import annotations

import json

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_pglock.models import Task
from django_pglock.store import windows
from django_pglock.store.marking import first_free, marking_sql
from django_pglock.store.retry import retriable
from tests.plans.reading import analyze, insert, plan_of, reads
from tests.plans.store.backlog import Call


def calls(backlog):
    retried = retriable(Task.objects.filter(pk=backlog.first)).order_by("pk")
    changes = {"status": "READY", "finished_at": None}
    return {"of one": Call(*marking_sql(first_free(retried, 1000, no_key=True), changes, '"queue"'))}


def test_a_retry_of_one_reads_its_row(plans):
    plans.check()


@pytest.mark.django_db(transaction=True)
def test_a_retry_of_many_reads_its_window_by_the_key(new_table, monkeypatch):
    monkeypatch.setattr(windows, "WINDOW", 500)
    insert("SUCCESSFUL", 20_000)
    insert("FAILED", 1500)
    Task.objects.filter(status="FAILED", pk__in=Task.objects.order_by("-pk").values("pk")[:10]).update(
        unique_scope="UNFINISHED", unique_key="key"
    )
    analyze()
    with CaptureQueriesContext(connection) as queries:
        assert Task.objects.filter(status="FAILED").retry() == 1491
    statements = [each["sql"] for each in queries if '"django_pglock_task"' in each["sql"]][1:]
    assert len(statements) >= 9, "three statements for each of three windows"
    for sql in statements:
        plan = plan_of(sql)
        assert "Seq Scan" not in {kind for kind, _ in reads(plan)}, json.dumps(plan, indent=1)
