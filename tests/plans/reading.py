"""Helpers for tests of plans: they make rows, get plans, and read plans."""

from __future__ import annotations

import json

from django.db import connection

from django_pglock.store.insert_tasks import Call
from django_pglock.store.statements import BY_INDEX
from tests.sql import execute_sql

PATH = "tests.sample.tasks.nothing"
#: Rows of each kind that a statement has to deal with.
BATCH = 10
#: A call at the lock key of the backlog.
CALL = Call("[]", "{}", lock="backlog")
INSERT = """
INSERT INTO django_pglock_task (queue, task_path, backend, status, lock_key, fair_key, unique_key, unique_scope,
                                run_after, worker, last_attempted_at, attempts, finished_at, group_key)
SELECT 'default', 'tests.sample.tasks.nothing', 'default', %(status)s, %(lock)s, %(fair)s,
       'key ' || n, CASE WHEN %(status)s = 'SUCCESSFUL' THEN 'UNFINISHED' END,
       now() + %(seconds)s * n * interval '1 s',
       %(worker)s, CASE WHEN %(worker)s::uuid IS NOT NULL THEN now() END, 1,
       CASE WHEN %(status)s IN ('SUCCESSFUL', 'FAILED') THEN now() END, 'group'
FROM generate_series(1, %(count)s) AS n
"""


def insert(status, count, *, lock=None, fair=None, seconds=0, worker=None):
    values = {"status": status, "count": count, "lock": lock, "fair": fair, "seconds": seconds, "worker": worker}
    execute_sql(INSERT if status == "SUCCESSFUL" else INSERT.replace("'key ' || n", "NULL"), values)


def delete_all(*tables):
    """Delete all rows of tables, those of the last table first, and analyze the tables while they are empty."""
    with connection.cursor() as cursor:
        for table in reversed(tables):
            cursor.execute(f"DELETE FROM {table}")
        cursor.execute(f"ANALYZE {', '.join(tables)}")


def analyze():
    execute_sql("ANALYZE django_pglock_task")


def plan_of(sql, params=None):
    answer = execute_sql(f"EXPLAIN (FORMAT JSON) {sql}", params)[0][0]
    return answer if isinstance(answer, list) else json.loads(answer)


def executed(sql, params=None, *, by_index=False):
    """Execute a statement, undo it, and return its plan. ``by_index``: as in admission and upkeep."""
    with connection.cursor() as cursor:
        cursor.execute("SAVEPOINT before")
        if by_index:
            cursor.execute(f"SELECT {BY_INDEX}")
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {sql}", params)
        answer = cursor.fetchone()[0]
        cursor.execute("ROLLBACK TO before")
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


def indexes(plan):
    """Return the names of all indexes that are read."""
    return {node["Index Name"] for node in nodes(plan) if "Index Name" in node}


def rows_read(plan):
    """Return how many rows of our tables were read, including those that a filter removed."""
    return sum(
        (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        for node in nodes(plan)
        if node.get("Relation Name", "").startswith("django_pglock_") and "Scan" in node["Node Type"]
    )


def pages_read(plan):
    """Return how many pages were read, including those of indexes."""
    return plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"]


def comparisons(plan):
    """Return how many pairs of rows a join has compared and thrown away."""
    return sum(node.get("Rows Removed by Join Filter", 0) * node["Actual Loops"] for node in nodes(plan))


def scans_by_key(plan, most=1):
    """Return how many scans of the task table read ``most`` rows by the index of lock keys, and how many there are.

    Each scan has to be planned, which takes longer than to execute it. None of them may be other than by an index.
    """
    table = [node for node in nodes(plan) if node.get("Relation Name") == "django_pglock_task"]
    scans = [node for node in table if "Scan" in node["Node Type"]]
    assert {node["Node Type"] for node in scans} <= {"Index Scan", "Index Only Scan"}
    by_key = [node for node in scans if node.get("Index Name") == "pglock_task_lock"]
    assert max(node["Actual Rows"] for node in by_key) <= most
    return [len(by_key), len(scans)]
