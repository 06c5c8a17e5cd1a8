"""Statements that read a part of a long table walk an index, and stop at their limits."""

from __future__ import annotations

import json

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_pglock.models import RateLimit, Task
from django_pglock.store import operate
from django_pglock.store.rate import DELETE_UNUSED_RATES
from django_pglock.store.statements import filled
from tests.plans.reading import analyze, executed, insert, nodes, pages_read, plan_of, reads
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db
KEYS, WINDOW = 20_000, 500


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


@pytest.fixture
def buckets():
    """All buckets are in use, but every hundredth."""
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE django_pglock_ratelimit")
        cursor.execute(
            "INSERT INTO django_pglock_ratelimit (key, arrives_at)"
            " SELECT 'key ' || n, now() - CASE WHEN n %% 100 = 0 THEN interval '2 days' ELSE interval '0' END"
            " FROM generate_series(1, %s) AS n",
            [KEYS],
        )


@pytest.mark.parametrize("statistics", ["of an empty table", "of now"])
@pytest.mark.parametrize("after", ["", "key 5"])
def test_deleting_unused_rates_reads_only_a_window_of_keys(buckets, statistics, after):
    """With a million keys, a statement without an index on the dates reads all of them in a quarter of a second."""
    if statistics == "of now":
        execute_sql("ANALYZE django_pglock_ratelimit")
    plan = executed(filled(DELETE_UNUSED_RATES), [after, WINDOW], by_index=True)
    [window] = [node for node in nodes(plan) if node["Node Type"] == "Limit"]
    assert window["Actual Rows"] == WINDOW
    scans = [node for node in nodes(plan) if node.get("Relation Name") == "django_pglock_ratelimit"]
    read = sum(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in scans
        if "Scan" in node["Node Type"]
    )
    assert WINDOW < read <= WINDOW + 2 * WINDOW / 10, "the window, and twice those that are deleted"
    assert pages_read(plan) < 2 * WINDOW
    assert RateLimit.objects.count() == KEYS
