"""Searches for positions in the ids of all tasks."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_pglock.models import Task
from django_pglock.store.id_range import PRECISION, id_in, ids_between, newest
from tests.db.store.test_prune import make
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db

BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)


def spread(*ids):
    """Make a task for each id, enqueued so many seconds after the beginning."""
    execute_sql(
        """INSERT INTO django_pglock_task (id, queue, task_path, backend, enqueued_at)
           OVERRIDING SYSTEM VALUE
           SELECT id, 'q', 'a.b', 'default', %s + id * interval '1 second' FROM unnest(%s::bigint[]) AS id""",
        [BEGAN, list(ids)],
    )


@pytest.mark.parametrize("ids", [range(1, 9000), [*range(1, 1000), *range(500_000, 500_100)], [7], []])
def test_a_moment_is_found_among_ids_with_gaps(ids):
    spread(*ids)
    for second in (0, 7, 500, 4321, 500_050, 10**6):
        moment = BEGAN + timedelta(seconds=second)
        range_ = ids_between("default", moment, moment)
        late, early = [each for each in ids if each >= second], [each for each in ids if each < second]
        assert all(range_["pk__gt"] < each for each in late), "no task since then is left out"
        assert all(each < range_["pk__lt"] for each in early), "nor one before"
        assert range_["pk__lt"] - range_["pk__gt"] <= PRECISION + 1


def test_a_text_is_an_id_only_if_a_task_can_have_it():
    """Python refuses to convert a text of more than 4,300 digits."""
    assert [id_in(text) for text in ("7", "0", str(2**63 - 1))] == [7, 0, 2**63 - 1]
    assert [id_in(text) for text in ("", "-1", "x", "\u0663", str(2**63), "1" * 5000)] == [None] * 6


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
