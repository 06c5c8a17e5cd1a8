"""The newest tasks of some statuses."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_pglock.models import Task
from django_pglock.store.newest import newest
from tests.db.store.test_prune import make

pytestmark = pytest.mark.django_db


def test_the_newest_of_all_statuses_come_first_and_one_statement_is_sent_for_each(django_assert_num_queries):
    failed, cancelled, done, again = (
        make(status, days=0).pk for status in ("FAILED", "CANCELLED", "SUCCESSFUL", "FAILED")
    )
    tasks = Task.objects.all()

    def ids(limit=10, **options):
        return [row.pk for row in newest(tasks, limit, **options)]

    assert ids() == [again, done, cancelled, failed]
    assert ids(3) == [again, done, cancelled]
    with django_assert_num_queries(2):
        assert ids(statuses=["FAILED", "CANCELLED", "FAILED"]) == [again, cancelled, failed]
    with CaptureQueriesContext(connection) as queries:
        assert ids(2, statuses=["FAILED", "CANCELLED"]) == [again, cancelled]
    assert all(query["sql"].endswith("LIMIT 2") and "BETWEEN" in query["sql"] for query in queries)
    with CaptureQueriesContext(connection) as queries:
        assert ids(statuses=["FAILED"], is_narrow=True) == [again, failed]
    assert "BETWEEN" not in queries[0]["sql"], "an index on queue or function has the failed tasks"
    assert ids(statuses=["RUNNING"]) == []


def test_with_a_number_of_days_only_older_tasks_are_returned():
    older, old = make("FAILED", days=9).pk, make("FAILED", days=2).pk  # ids grow with the time of enqueueing
    make("FAILED", days=0)
    assert {row.pk for row in newest(Task.objects.all(), 10, days=1)} == {old, older}
    assert [row.pk for row in newest(Task.objects.all(), 10, statuses=["FAILED"], days=8)] == [older]


def test_with_a_number_of_days_a_young_task_with_a_low_id_is_not_returned():
    """Ids are only roughly in the order of time."""
    for id_, days in enumerate((2, 0, 2, 2, 2), 1):
        make("FAILED", days=days, pk=id_)
    assert [row.pk for row in newest(Task.objects.all(), 10, days=1)] == [5, 4, 3, 1]
