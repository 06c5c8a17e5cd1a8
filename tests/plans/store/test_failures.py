"""Groups of failures are found and counted by one index, whatever the number of failed tasks is."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_pglock.models import Task
from django_pglock.store.failures import FAILURE_GROUPS, UNMARKED_FAILURES
from django_pglock.store.sql import filled
from tests.plans.reading import analyze, executed, insert, nodes, reads, rows_read

pytestmark = pytest.mark.django_db

INDEX = "pglock_task_fingerprint"


@pytest.fixture
def incident(new_table):
    """Twelve thousand failed tasks: half of them in one group, a third in fifty others, the rest without fingerprint.

    Beside them is a history of others.
    """
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
    plan = executed(filled(FAILURE_GROUPS), (1000, True, 20, 24, 500, 20_000))
    assert reads(plan) == {("Index Only Scan", INDEX), ("Index Scan", "django_pglock_task_pkey")}
    # 51 groups are found by a probe and looked at by another. 20 are counted; one of them has more than 500.
    assert rows_read(plan) <= 2 * 51 + 20 * 500 + 2 * 20
    assert plan[0]["Plan"]["Actual Rows"] == 20
    assert "JIT" not in plan[0]
    assert not [each for each in nodes(plan) if each["Node Type"] == "Sort" and each["Actual Rows"] > 500]


@pytest.mark.parametrize("is_analyzed", [True, False])
def test_of_those_without_a_fingerprint_so_many_are_read(incident, is_analyzed):
    if is_analyzed:
        analyze()
    plan = executed(filled(UNMARKED_FAILURES), (500,))
    assert reads(plan) == {("Index Scan", INDEX)}
    assert rows_read(plan) == 500


def test_the_groups_are_four_statements_at_most(incident):
    with CaptureQueriesContext(connection) as queries:
        Task.objects.failures()
    assert len(queries) == 4
