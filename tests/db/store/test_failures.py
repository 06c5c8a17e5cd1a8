"""Failed tasks in groups: what a worker writes, what is counted, and which tasks belong to a group."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_pglock.error_reading import fingerprint_of
from django_pglock.models import Attempt, Task
from django_pglock.store import failures as store
from django_pglock.store.outcome import Cancelled, Failed, Failure, Retried, Succeeded
from django_pglock.store.settle import settle
from tests.db.admin.visits import make
from tests.sample import tasks

pytestmark = pytest.mark.django_db

PATH = tasks.nothing.module_path
TRACE = 'Traceback\n  File "/srv/shop/bank.py", line 88, in pay\n    post()\nbank.Refused: order 7'
REFUSED = Failure("bank.Refused", TRACE, place="bank:pay")


def fail(exception="bank.Refused", *, fingerprint=7, trace=TRACE, hours_ago=0.0, **fields):
    """Make a failed task with its attempt."""
    task = make("FAILED", fingerprint=fingerprint, **fields)
    Task.objects.filter(pk=task.pk).update(finished_at=Now() - timedelta(hours=hours_ago))
    if exception:
        Attempt.objects.create(
            task=task, number=1, outcome="FAILED", exception_path=exception, traceback=trace, started_at=Now(),
            finished_at=Now(),
        )  # fmt: skip
    return task


@pytest.mark.parametrize("outcome", [Succeeded(), Retried(REFUSED, 1), Retried(REFUSED, 0), Cancelled(REFUSED)])
def test_only_a_failure_has_a_fingerprint(claim, outcome):
    tasks.nothing.enqueue()
    [mine] = claim()
    settle("default", [(mine, outcome)], mine.worker)
    assert Task.objects.get().fingerprint is None


def test_a_failure_is_settled_with_its_fingerprint_and_retried_without(claim):
    tasks.nothing.enqueue()
    [mine] = claim()
    with CaptureQueriesContext(connection) as queries:
        settle("default", [(mine, Failed(REFUSED))], mine.worker)
    assert len(queries) == 1
    assert Task.objects.get().fingerprint == fingerprint_of(PATH, "bank.Refused", "bank:pay")
    assert Task.objects.all().retry() == 1
    assert Task.objects.get().fingerprint is None, "else a task that succeeds now would keep it"


def test_a_group_of_failures_has_exception_place_count_and_dates():
    hours = (2.5, 26, 30, 2.2, 0.5, 0.7)
    _, _, oldest, _, last, newest = (fail(fingerprint=7, hours_ago=hours_ago) for hours_ago in hours)
    [group] = Task.objects.failures()
    assert (group.fingerprint, group.task_path, group.exception_path) == (7, PATH, "bank.Refused")
    assert (group.name, group.exception, group.place, group.message) == ("nothing", "Refused", "bank.py:88", "order 7")
    assert (group.newest, group.count, group.is_capped) == (newest.pk, 6, False)
    oldest.refresh_from_db()
    last.refresh_from_db()
    assert (group.first_at, group.last_at) == (oldest.finished_at, last.finished_at)
    assert group.by_hour == (*[0] * 21, 2, 0, 2)


def test_the_latest_failures_come_first():
    for fingerprint, hours_ago in ((5, 3), (6, 1), (7, 2)):
        fail(fingerprint=fingerprint, hours_ago=hours_ago)
    groups = Task.objects.failures()
    assert [each.fingerprint for each in groups] == [6, 7, 5]
    assert all(each.first_at == each.last_at for each in groups)
    assert [each.fingerprint for each in Task.objects.failures(limit=1)] == [6]


def test_counts_of_failures_stop_at_their_limit(monkeypatch):
    first = [fail(fingerprint=7, hours_ago=3), *(fail(fingerprint=7) for _ in range(4))][0]
    [group] = Task.objects.failures(most=3)
    assert (group.count, group.is_capped) == (3, True)
    first.refresh_from_db()
    assert group.first_at == first.finished_at
    monkeypatch.setattr(store, "MOST_FOUND", 3)
    for fingerprint in (8, 9, 10):
        fail(fingerprint=fingerprint)
    assert {each.fingerprint for each in Task.objects.failures()} == {7, 8, 9}


@pytest.mark.usefixtures("without_indexes")
def test_a_count_that_stops_is_of_the_newest_whatever_the_plan():
    oldest, _, _, newest = (fail(fingerprint=7, hours_ago=hours_ago) for hours_ago in (7.5, 5.5, 3.5, 1.5))
    # A changed row is behind the others in the table.
    Task.objects.filter(pk=oldest.pk).update(priority=1)
    [group] = Task.objects.failures(most=2)
    oldest.refresh_from_db()
    newest.refresh_from_db()
    assert (group.first_at, group.last_at, group.newest) == (oldest.finished_at, newest.finished_at, newest.pk)
    assert group.by_hour == (*[0] * 20, 1, 0, 1, 0)


def test_the_message_is_that_of_the_last_attempt():
    task = fail()
    for number in (3, 2):
        trace = TRACE.replace("order 7", f"attempt {number}")
        dates = {"started_at": Now(), "finished_at": Now()}
        Attempt.objects.create(
            task=task, number=number, outcome="FAILED", exception_path="bank.Refused", traceback=trace, **dates
        )
    [group] = Task.objects.failures()
    assert (group.message, group.count) == ("attempt 3", 1)


def test_the_place_and_the_message_are_found_before_a_message_of_any_length():
    fail(trace=TRACE + " and more" * 10_000)
    [group] = Task.objects.failures()
    assert (group.place, group.message[:17]) == ("bank.py:88", "order 7 and more ")


def test_only_failed_tasks_are_in_a_group():
    mine = [fail(), fail()]
    fail(fingerprint=8)
    make("SUCCESSFUL", fingerprint=7)
    assert list(store.in_group(Task.objects.order_by("pk"), 7)) == mine


def test_the_newest_failure_of_a_group_names_its_function_and_its_last_exception():
    fail("bank.Closed")
    task = fail()
    Attempt.objects.filter(task=task).update(number=2)
    again = {"number": 1, "outcome": "FAILED", "exception_path": "bank.Closed", "traceback": TRACE}
    Attempt.objects.create(task=task, started_at=Now(), finished_at=Now(), **again)
    with CaptureQueriesContext(connection) as queries:
        assert store.newest_failure("default", 7) == (PATH, "bank.Refused")
    assert all(query["sql"].endswith("LIMIT 1") for query in queries)
    fail(exception=None, fingerprint=8)
    assert store.newest_failure("default", 8) == (PATH, "")
    assert store.newest_failure("default", 9) is None
