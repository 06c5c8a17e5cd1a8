"""Which index serves each hot statement: ask EXPLAIN, not the clock."""

from __future__ import annotations

import json
from uuid import uuid4

import pytest
from django.db import connection
from django.db.models.functions import Now

from django_pglock.models import Task
from django_pglock.store.claim import claim_statement
from django_pglock.store.count import COUNT_OTHERS, COUNT_READY
from django_pglock.store.marking import first_free, marking_sql
from django_pglock.store.promote import due
from django_pglock.store.prune import NEXT_WINDOW, expired, outdated, pruning_sql
from django_pglock.store.rescue import RESCUE
from django_pglock.store.settle import SETTLE_SUCCESSES
from django_pglock.store.sql import filled
from django_pglock.store.unknown import UNKNOWN
from tests.plans.conftest import STATEMENTS

pytestmark = pytest.mark.django_db


@pytest.fixture
def history(new_table):
    """Twenty thousand finished rows, two thousand waiting, and statistics that know it."""
    with connection.cursor() as cursor:
        cursor.execute(
            """INSERT INTO django_pglock_task (queue, task_path, backend, status, finished_at, run_after, priority)
               SELECT 'q' || n % 5, 'tests.sample.tasks.nothing', 'default',
                      CASE WHEN n <= 20000 THEN 'SUCCESSFUL' WHEN n <= 21000 THEN 'READY' ELSE 'SCHEDULED' END,
                      CASE WHEN n <= 20000 THEN now() END, CASE WHEN n > 21000 THEN now() + n * interval '1 s' END,
                      n % 3
               FROM generate_series(1, 22000) AS n"""
        )
        cursor.execute("ANALYZE django_pglock_task")


def plan_of(sql, params=None):
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (FORMAT JSON) {sql}", params)
        answer = cursor.fetchone()[0]
    return answer if isinstance(answer, list) else json.loads(answer)


def nodes(plan):
    if isinstance(plan, list):
        for each in plan:
            yield from nodes(each)
    elif isinstance(plan, dict):
        if "Node Type" in plan:
            yield plan
        for each in plan.values():
            yield from nodes(each)


def reads(plan):
    """Return how the task table is read: (kind of scan, index)."""
    return {
        (node["Node Type"], next((each["Index Name"] for each in nodes(node) if "Index Name" in each), None))
        for node in nodes(plan)
        if node.get("Relation Name") == "django_pglock_task" and "Scan" in node["Node Type"]
    }


def test_a_claim_walks_the_ready_index_in_order(history):
    paths = ["tests.sample.tasks.nothing", "tests.sample.tasks.echo"]
    plan = plan_of(claim_statement("default", worker=uuid4(), paths=paths).sql(10, "q1"))
    assert ("Index Scan", "pglock_task_ready") in reads(plan)
    assert "Seq Scan" not in {kind for kind, _ in reads(plan)}
    assert "Sort" not in {node["Node Type"] for node in nodes(plan)}


@pytest.mark.parametrize("batch", [1, 500])
def test_a_settle_finds_its_rows_by_key(history, batch):
    ids = list(range(1, batch + 1))
    sql = filled(SETTLE_SUCCESSES)
    assert "Seq Scan" not in {kind for kind, _ in reads(plan_of(sql, (ids, [1] * batch, ["null"] * batch)))}


@pytest.mark.parametrize("statement", ["NOTE_PROGRESS", "NOTE_LAST_PROGRESS"])
def test_progress_finds_its_rows_by_index(history, statement):
    sql = filled(STATEMENTS[statement])
    assert "Seq Scan" not in {kind for kind, _ in reads(plan_of(sql, ([1, 2], [1, 1], ["1", "2"])))}


def test_the_other_statements_use_their_partial_indexes(history):
    worker = uuid4()
    Task.objects.filter(status="READY", queue="q1").update(status="RUNNING", worker=worker, last_attempted_at=Now())
    expected = {
        "NEXT_DUE": ((), {"pglock_task_due"}),
        "READY_QUEUES": ((), {"pglock_task_ready", "pglock_task_fair"}),
        "UNKNOWN": ((30.0, None, 1000, 1000, None), {"pglock_task_ready", "pglock_task_fair"}),
        "GIVE_BACK": ((worker, [1], 0.0, None, []), {"pglock_task_running"}),
        "DOUBTFUL": ((None, 6.6), {"pglock_task_running"}),
        "READY_PATHS": ((1000, 1000), {"pglock_task_ready", "pglock_task_fair"}),
        "CANCEL_REQUESTS": ((worker,), {"pglock_task_running"}),
    }
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE django_pglock_task")
    for name, (params, index) in expected.items():
        plan = plan_of(filled(STATEMENTS[name]), params or None)
        assert {each for _, each in reads(plan)} == index, json.dumps(plan, indent=1)


def test_no_more_than_the_first_of_each_queue_is_read_for_the_unknown(history):
    """A million that wait behind them cost nothing: no node yields more than the limit of each queue."""
    sql = filled(UNKNOWN)
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", (30.0, None, 10, 10, None))
        answer = cursor.fetchone()[0]
    plan = answer if isinstance(answer, list) else json.loads(answer)
    table = [node for node in nodes(plan) if node.get("Relation Name") == "django_pglock_task"]
    assert max(node["Actual Rows"] for node in table) <= 10
    assert {queue: waiting for _, queue, waiting, _ in Task.objects.all().unknown(limit=10)} == dict.fromkeys(
        ("q0", "q1", "q2", "q3", "q4"), 10
    )


def test_promotion_walks_the_due_index(history):
    sql, params = marking_sql(first_free(due(Task.objects.all()), 1000, no_key=True), {"status": "READY"}, '"queue"')
    assert "pglock_task_due" in {index for _, index in reads(plan_of(sql, params))}


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


def test_counts_of_queues_walk_partial_indexes_and_stop(history):
    ready = plan_of(filled(COUNT_READY), (["q1", "q2"], 100, 100))
    assert {index for _, index in reads(ready)} == {"pglock_task_ready", "pglock_task_fair"}
    others = plan_of(filled(COUNT_OTHERS), (100,))
    assert {index for _, index in reads(others)} == {"pglock_task_attention"}
    assert not [each for each in nodes([ready, others]) if each["Node Type"] == "Sort" and each["Plan Rows"] > 1000]


def test_rescue_looks_only_at_what_runs(history):
    sql = filled(RESCUE)
    used = reads(plan_of(sql, (4.5, 5.25, 6.6, 30.0, 1000, 3, "x", "y")))
    assert "Seq Scan" not in {kind for kind, _ in used}
