"""The plans of the admin's pages: with 20,000 rows, nothing reads the table of tasks from end to end."""

from __future__ import annotations

import json

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_pglock.admin import task_list
from django_pglock.models import Lease, Task
from tests.plans.admin.explained import plans
from tests.plans.reading import executed, insert, nodes, reads

pytestmark = pytest.mark.django_db

LIST = reverse("admin:django_pglock_task_changelist")


@pytest.fixture(scope="module")
def last_of_many(fill):
    return fill(write_many)


@pytest.fixture
def many(admin_client, last_of_many):
    return last_of_many


def write_many():
    with connection.cursor() as cursor:
        cursor.execute(
            """INSERT INTO django_pglock_task
                      (queue, task_path, backend, status, worker, last_attempted_at, finished_at, args)
               SELECT CASE WHEN n % 3 = 0 THEN 'q0' ELSE 'q1' END, 'tests.sample.tasks.nothing',
                      'default', status, gen_random_uuid(), now(),
                      CASE WHEN status IN ('FAILED', 'SUCCESSFUL') THEN now() END,
                      to_jsonb(ARRAY[repeat('x', 100)])
               FROM (SELECT n, CASE WHEN n % 50 = 0 THEN 'FAILED' WHEN n % 51 = 0 THEN 'RUNNING'
                                    WHEN n > 19900 THEN 'READY' ELSE 'SUCCESSFUL' END AS status
                     FROM generate_series(1, 20000) AS n) AS made"""
        )
        cursor.execute("ANALYZE django_pglock_task")
        cursor.execute("SELECT max(id) FROM django_pglock_task")
        return cursor.fetchone()[0]


# There is no index on queues or functions. Along the primary key the rows of a common one are found at once. The search
# for one with fewer rows than are counted reads on, so "q0" is not in this list.
QUERIES = (
    "",
    "?p=50",
    "?status__exact=FAILED",
    "?status__exact=READY",
    "?status__exact=RUNNING",
    "?status__exact=SUCCESSFUL",
    "?queue=q1",
    "?task_path=tests.sample.tasks.nothing",
    "?attention=stuck",
    "?suspended=SCHEDULED",
    "?suspended=BLOCKED",
    "?id__lt={middle}",
    "?q={middle}",
    "?q=tests.sample",
    "?status__exact=FAILED&queue=q1&id__lt={middle}",
)


def test_no_list_scans_the_table(admin_client, many):
    for query in QUERIES:
        with CaptureQueriesContext(connection) as queries:
            assert admin_client.get(LIST + query.format(middle=many - 17_000)).status_code == 200
        explained = list(plans(queries))
        assert len(explained) >= 2, f"the count and the rows of {query}"
        for sql, plan in explained:
            assert "Seq Scan" not in {kind for kind, _index in reads(plan)}, f"{sql}\n{json.dumps(plan, indent=1)}"
            assert not [each for each in nodes(plan) if each["Node Type"] == "Sort" and each["Plan Rows"] > 1000], sql


def test_the_list_of_an_event_walks_the_index_of_events(admin_client, many, monkeypatch):
    """More tasks wait for one event than a list counts."""
    monkeypatch.setattr(task_list, "MOST_WAITING", 100)
    with connection.cursor() as cursor:
        cursor.execute(
            """INSERT INTO django_pglock_step (task_id, name, number, kind, event, attempt, started_at)
               SELECT n, 'wait', 1, 'EVENT', 'packed:' || n % 5, 1, now() FROM generate_series(1, 20000) AS n"""
        )
        cursor.execute("ANALYZE django_pglock_step")
    with CaptureQueriesContext(connection) as queries:
        assert admin_client.get(f"{LIST}?event=packed:3&id__lt=19000").status_code == 200
    [sql] = [each["sql"] for each in queries if 'FROM "django_pglock_step"' in each["sql"]]
    plan = list(nodes(executed(sql)))
    assert [each["Index Name"] for each in plan if "Index Name" in each] == ["pglock_step_event"]
    assert "Sort" not in {each["Node Type"] for each in plan}
    [(_sql, rows)] = plans(queries)
    assert "Seq Scan" not in {kind for kind, _index in reads(rows)}


def test_the_list_of_events_walks_an_index(admin_client):
    with connection.cursor() as cursor:
        cursor.execute(
            """INSERT INTO django_pglock_event (name, payload, emitted_at, expires_at)
               SELECT 'packed:' || n, '1', now(), now() + n * interval '1 s' FROM generate_series(1, 20000) AS n"""
        )
        cursor.execute("ANALYZE django_pglock_event")
    for query in ("", "?q=packed:1", "?q=packed"):
        with CaptureQueriesContext(connection) as queries:
            assert admin_client.get(reverse("admin:django_pglock_event_changelist") + query).status_code == 200
        asked = [each["sql"] for each in queries if '"django_pglock_event"' in each["sql"]]
        assert len(asked) == 2, "the count and the rows"
        for sql in asked:
            kinds = {each["Node Type"] for each in nodes(executed(sql))}
            assert not kinds & {"Sort", "Seq Scan"}, (query, sql, kinds)


def test_the_list_costs_the_same_queries_however_long_it_is(admin_client, many):
    def cost(query):
        with CaptureQueriesContext(connection) as queries:
            assert admin_client.get(LIST + query).status_code == 200
        return len(queries)

    assert cost("") == cost(f"?id__lt={many - 19_997}") <= 5


def test_a_list_loads_nothing_that_it_does_not_show(admin_client, many):
    with CaptureQueriesContext(connection) as queries:
        admin_client.get(LIST)
    for each in queries:
        for column in ("args", "kwargs", "result", "meta"):
            assert f'"django_pglock_task"."{column}"' not in each["sql"]


def test_attempts_are_read_by_the_index_of_their_numbers(admin_client, new_table):
    insert("FAILED", 20, lock="key")
    rows = list(Task.objects.values_list("pk", flat=True))
    with connection.cursor() as cursor:
        cursor.execute(
            """INSERT INTO django_pglock_attempt
                      (task_id, number, worker, started_at, finished_at, outcome, exception_path, traceback)
               SELECT id, n, gen_random_uuid(), now(), now(), 'FAILED', 'a.B', repeat('x', 100)
               FROM unnest(%s::bigint[]) AS id, generate_series(1, 1000) AS n""",
            [rows],
        )
        cursor.execute("ANALYZE django_pglock_attempt")
    for page, args, counts in (
        # The page of a task also begins with the last attempt.
        ("change", (), [1, 50]), ("attempt", (7,), [1]),
    ):  # fmt: skip
        with CaptureQueriesContext(connection) as queries:
            url = reverse(f"admin:django_pglock_task_{page}", args=[rows[10], *args])
            assert admin_client.get(url).status_code == 200
        found = []
        for sql in (each["sql"] for each in queries if each["sql"].startswith('SELECT "django_pglock_attempt"')):
            plan = list(nodes(executed(sql)))
            [scan] = [each for each in plan if each.get("Relation Name") == "django_pglock_attempt"]
            assert (scan["Node Type"], scan["Index Name"]) == ("Index Scan", "pglock_attempt_number")
            found.append(scan["Actual Rows"] + scan.get("Rows Removed by Filter", 0))
            assert "Sort" not in {each["Node Type"] for each in plan}
        assert sorted(found) == counts, page


def test_workers_are_listed_with_their_tasks_by_the_index_of_running_ones(admin_client, many):
    with CaptureQueriesContext(connection) as queries:
        assert admin_client.get(reverse("admin:django_pglock_worker_changelist")).status_code == 200
    explained = list(plans(queries))
    assert len(explained) == 1, "the workers and what they run, in one query"
    assert {index for _kind, index in reads(explained[0][1])} <= {"pglock_task_running", "pglock_task_attention"}


def test_the_list_of_leases_walks_an_index():
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO django_pglock_lease (key, name, owner, holder, token, acquired_at, renewed_at, released_at)"
            " SELECT n, 'lease ' || n, 'host', gen_random_uuid(), 1, now() - n * interval '1 s', now(),"
            " CASE WHEN n % 1000 > 0 THEN now() END FROM generate_series(1, 20000) AS n"
        )
        cursor.execute("ANALYZE django_pglock_lease")
    for rows in (Lease.objects.all(), Lease.objects.all().held()):
        plan = rows.order_by("-acquired_at")[:100].explain()
        assert "django_pglock_lease_" in plan
        assert "Seq Scan" not in plan


def test_stuck_tasks_are_found_without_a_query_for_each_worker(admin_client, many):
    """Once for all workers that live, also where the planner expects a few running tasks."""
    with CaptureQueriesContext(connection) as queries:
        assert admin_client.get(f"{LIST}?attention=stuck").context["cl"].result_count
    looks = [
        node
        for sql, _plan in plans(queries)
        for node in nodes(executed(sql))
        if node.get("Relation Name") == "django_pglock_worker"
    ]
    assert looks
    assert {node["Actual Loops"] for node in looks} <= {0, 1}
