"""The failed and lost attempts of a task, before and after it has moved to the archive."""

from __future__ import annotations

import pytest

from django_pglock.models import ArchivedTask, Task
from django_pglock.store.attempts import attempts_before, failures_of, last_ended_by
from tests.db.store.archiving import TWO_HOURS, fail, walk
from tests.db.store.test_prune import make

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_archive")]

#: What both rows of an attempt have.
VALUES = ("task_id", "number", "worker", "worker_name", "outcome", "exception_path", "traceback", "log")
DATES = ("started_at", "finished_at")


def values(attempts):
    return [[getattr(each, name) for name in (*VALUES, *DATES)] for each in attempts]


def test_attempts_of_a_task_are_returned_in_their_order():
    row, other = make("READY"), make("READY")
    fail(row, 2), fail(row, 1), fail(other, 1)
    assert [each.number for each in attempts_before("default", row.pk)] == [1, 2]
    assert attempts_before("default", 10**12) == []


def test_tasks_are_found_by_the_exception_of_their_last_attempt():
    """Claims that were given back or snoozed have no attempt, so their number is not that of the last attempt."""
    last, given_back, earlier, other = (
        make("FAILED", attempts=2),
        make("FAILED", attempts=5, uncounted=3),
        make("FAILED", attempts=2),
        make("FAILED", attempts=1),
    )
    for row in (last, given_back):
        fail(row, 1), fail(row, 2, exception_path="a.Refused")
    fail(earlier, 1, exception_path="a.Refused"), fail(earlier, 2), fail(other, 1)
    make("FAILED", attempts=1)
    assert set(last_ended_by(Task.objects.all(), "a.Refused")) == {last, given_back}
    assert set(last_ended_by(Task.objects.filter(pk=last.pk), "a.Refused")) == {last}
    assert not last_ended_by(Task.objects.all(), "a.Refuse").exists()


def test_attempts_of_an_archived_task_are_unchanged(django_assert_num_queries, settings):
    row = make(days=TWO_HOURS, attempts=3)
    fail(row, 2, outcome="LOST", worker=None, log=None), fail(row, 1)
    before = {}
    for settings.USE_TZ in (True, False):
        before[settings.USE_TZ] = values(failures_of(Task.objects.get(pk=row.pk)))
    assert walk() == 1
    archived = ArchivedTask.objects.get(pk=row.pk)
    for settings.USE_TZ in (True, False):
        with django_assert_num_queries(0):
            assert values(failures_of(archived)) == before[settings.USE_TZ]
