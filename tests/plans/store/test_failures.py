"""Groups of failures are found and counted by one index, whatever the number of failed tasks is."""

from __future__ import annotations

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_pglock.models import Task
from django_pglock.store.bulk import Work, next_ids, redrives
from django_pglock.store.failures import FAILURE_GROUPS, in_group
from django_pglock.store.statements import filled
from tests.plans.reading import analyze, executed, insert, nodes, reads, rows_read

pytestmark = pytest.mark.django_db

INDEX = "pglock_task_fingerprint"


@pytest.fixture(scope="module")
def failed_tasks(fill):
    fill(write_incident)


@pytest.fixture
def incident(failed_tasks, db):
    """Twelve thousand failed tasks: half of them in one group, a third in fifty others, the rest in none.

    Beside them is a history of others. The table has no statistics.
    """


def write_incident():
    insert("SUCCESSFUL", 10_000)
    insert("FAILED", 12_000)
    with connection.cursor() as cursor:
        cursor.execute(
            """UPDATE django_pglock_task
               SET fingerprint = CASE WHEN id %% 2 = 0 THEN 7 WHEN id %% 6 < 4 THEN 100 + id %% 50 END
               WHERE status = 'FAILED'"""
            .replace("%%", "%")
        )  # fmt: skip
    insert("SUCCESSFUL", 10_000)


@pytest.mark.parametrize("is_analyzed", [True, False])
def test_groups_are_counted_by_their_index_and_the_count_stops(incident, is_analyzed):
    if is_analyzed:
        analyze()
    plan = executed(filled(FAILURE_GROUPS), (1000, 20, 24, 500, 20_000))
    by_key = {("Index Scan", "django_pglock_task_pkey"), ("Bitmap Heap Scan", "django_pglock_task_pkey")}
    assert reads(plan) - by_key == {("Index Only Scan", INDEX)}
    # 51 groups are found by one probe each and read by another. 20 are counted; one of them has more than 500.
    assert rows_read(plan) <= 2 * 51 + 20 * 500 + 2 * 20
    assert plan[0]["Plan"]["Actual Rows"] == 20
    assert "JIT" not in plan[0]
    assert not [each for each in nodes(plan) if each["Node Type"] == "Sort" and each["Actual Rows"] > 500]


def statements_of(function):
    with CaptureQueriesContext(connection) as queries:
        function()
    return [each["sql"] for each in queries if each["sql"].lstrip().startswith(("SELECT", "WITH"))]


@pytest.mark.parametrize("is_analyzed", [True, False])
def test_a_redrive_finds_the_next_tasks_by_the_index(incident, is_analyzed):
    """Also in the middle of a group: nothing walks past the tasks that have succeeded."""
    if is_analyzed:
        analyze()
    middle = Task.objects.filter(fingerprint=7)[3000].pk
    failed = in_group(Task.objects.filter(finished_at__lte=Now()), 7)
    [sql] = statements_of(lambda: next_ids(failed, Work("retry", fingerprint=7), middle, 20))
    plan = executed(sql)
    assert reads(plan) <= {("Index Only Scan", INDEX), ("Index Scan", INDEX)}
    assert rows_read(plan) <= 21


def test_unfinished_redrives_are_found_by_their_unique_keys(incident):
    analyze()
    [sql] = statements_of(lambda: redrives("default", range(100)))
    plan = executed(sql)
    assert {index for _kind, index in reads(plan)} == {"pglock_task_unique"}
    assert rows_read(plan) == 0


def test_the_page_of_failures_has_few_statements(incident, admin_client):
    def statements():
        found = statements_of(lambda: admin_client.get(reverse("admin:django_pglock_failuregroup_changelist")))
        return [sql for sql in found if "django_pglock" in sql]

    assert len(statements()) == 2, "groups; redrives"
