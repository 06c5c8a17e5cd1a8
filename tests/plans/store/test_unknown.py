"""Unknown tasks are searched among the first tasks of each queue."""

from __future__ import annotations

import json

import pytest
from django.db import connection

from django_pglock.store.ready import UNKNOWN
from django_pglock.store.statements import filled
from tests.plans.reading import BATCH, nodes
from tests.plans.store.backlog import Call


def calls(_backlog):
    return {"UNKNOWN": Call(filled(UNKNOWN), (30.0, None, BATCH, BATCH, None))}


def test_the_query_for_unknown_functions_reads_only_ready_tasks(plans):
    plans.check()


@pytest.mark.django_db
def test_the_query_for_unknown_functions_reads_a_limited_number_of_each_queue(history):
    """A million tasks behind them are not read: no node yields more than the limit of each queue."""
    sql = filled(UNKNOWN)
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", (30.0, None, 10, 10, None))
        answer = cursor.fetchone()[0]
    plan = answer if isinstance(answer, list) else json.loads(answer)
    table = [node for node in nodes(plan) if node.get("Relation Name") == "django_pglock_task"]
    assert max(node["Actual Rows"] for node in table) <= 10
