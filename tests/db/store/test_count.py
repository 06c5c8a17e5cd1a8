"""Counts of what is in the queues, for people and for metrics."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.db.models.functions import Now

from django_pglock.models import Queue, Task
from django_pglock.store.count import OLDEST, queue_counts, ready_counts
from django_pglock.tasks.queues import OWN_QUEUE
from tests.db.admin.visits import make

pytestmark = pytest.mark.django_db

INSERT = """
INSERT INTO django_pglock_task (queue, backend, task_path, status)
SELECT 'mail', 'default', 'app.send', 'READY' FROM generate_series(1, %s)
"""


@pytest.mark.parametrize(("there", "counted", "has_more"), [(9_999, 9_999, False), (10_001, 10_000, True)])
def test_counts_stop_where_the_documentation_says(there, counted, has_more):
    with connection.cursor() as cursor:
        cursor.execute(INSERT, [there])
    [mail] = queue_counts("default")
    assert (mail.queue, mail.counts["READY"], "READY" in mail.at_least) == ("mail", counted, has_more)


def test_counts_stop_at_another_limit_and_each_queue_has_its_own():
    for queue in ("mail", "bulk"):
        for status in ("READY", "FAILED", "BLOCKED"):
            for _ in range(3):
                make(status, queue=queue, fingerprint=ord(queue[0]) if status == "FAILED" else None)
    make("FAILED", queue="late", fingerprint=7), make("RUNNING", queue="late")
    bulk, late, mail = Task.objects.queue_counts(most=2)
    for each, queue in ((bulk, "bulk"), (mail, "mail")):
        assert (each.queue, each.counts["READY"], each.counts["FAILED"]) == (queue, 2, 2)
        assert each.at_least == {"READY", "FAILED", "BLOCKED"}
    assert (late.counts["READY"], late.counts["FAILED"], late.counts["RUNNING"]) == (0, 1, 1)
    assert late.at_least == {"BLOCKED"}, "BLOCKED tasks of all queues are counted together"


@pytest.mark.usefixtures("without_indexes")
def test_the_oldest_ready_task_is_found_among_those_with_the_lowest_ids():
    """Its priority may be low. Ids are only roughly in the order of time."""
    for age in (300, 500, 100, 0, 900):
        moment = Now() - timedelta(seconds=age)
        make("READY", priority=-5 if age == 500 else 0, enqueued_at=moment, run_after=moment)
    assert OLDEST == 3
    for fair_key in (None, "tenant"):
        Task.objects.update(fair_key=fair_key)
        [(queue, (count, oldest))] = ready_counts("default", ["default", "empty"]).items()
        assert (queue, count, 500 <= oldest < 900) == ("default", 5, True)


@pytest.mark.usefixtures("without_indexes")
def test_failed_tasks_and_the_newest_others_are_counted_whatever_the_plan():
    for status, queues in (("FAILED", "cabaa"), ("RUNNING", "abb")):
        for queue in queues:
            make(status, queue=queue, fingerprint=ord(queue) if status == "FAILED" else None)
    found = [(each.queue, each.counts["FAILED"], each.counts["RUNNING"]) for each in queue_counts("default", most=2)]
    assert found == [("a", 2, 0), ("b", 1, 2), ("c", 1, 0)]


def test_workable_tasks_are_ready_or_due_and_in_queues_that_are_not_paused():
    for queue in ("mail", "bulk", "late"):
        for _ in range(2):
            make("READY", queue=queue), make("SCHEDULED", queue=queue)
        make("SCHEDULED", queue=queue, run_after=Now() + timedelta(hours=1)), make("FAILED", queue=queue)
    Queue.objects.pause("late")
    count = Task.objects.count_workable
    assert [count(), count(["mail"]), count(["mail", "late"]), count(["late"])] == [8, 4, 4, 0]
    assert count(most=1) == 3, "a ready task of each of the two queues, and one that is due"
    make("READY", queue=OWN_QUEUE)
    assert [count(), count(["mail"])] == [9, 5], "each worker serves it"
