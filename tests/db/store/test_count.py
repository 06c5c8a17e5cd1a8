"""Counts of what is in the queues, and which functions and queues have ready tasks."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.db.models.functions import Now

from django_pglock.models import Task, Worker
from django_pglock.store import ready
from django_pglock.store.count import OLDEST, queue_counts
from django_pglock.store.ready import ready_paths, ready_queues, unknown
from tests.db.admin.visits import make
from tests.sample import tasks
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


INSERT = """
INSERT INTO django_pglock_task (queue, backend, task_path, status)
SELECT 'mail', 'default', 'app.send', 'READY' FROM generate_series(1, %s)
"""


@pytest.mark.parametrize(("there", "counted", "has_more"), [(9_999, 9_999, False), (10_001, 10_000, True)])
def test_counts_stop_where_the_documentation_says(there, counted, has_more):
    execute_sql(INSERT, [there])
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
        [found] = queue_counts("default")
        assert (found.queue, found.counts["READY"], 500 <= found.oldest_ready < 900) == ("default", 5, True)


@pytest.mark.usefixtures("without_indexes")
def test_failed_tasks_and_the_newest_others_are_counted_whatever_the_plan():
    for status, queues in (("FAILED", "cabaa"), ("RUNNING", "abb")):
        for queue in queues:
            make(status, queue=queue, fingerprint=ord(queue) if status == "FAILED" else None)
    found = [(each.queue, each.counts["FAILED"], each.counts["RUNNING"]) for each in queue_counts("default", most=2)]
    assert found == [("a", 2, 0), ("b", 1, 2), ("c", 1, 0)]


# The queues that have ready tasks.


def test_ready_queues_are_found_without_reading_every_row():
    for queue in ("b", "a", "b", "c"):
        tasks.nothing.using(queue_name=queue).enqueue()
    assert ready_queues("default") == dict.fromkeys("abc", False)


@pytest.mark.parametrize("fair", ["", "acdb", "ab", "cd"])
@pytest.mark.usefixtures("without_indexes")
def test_no_queue_is_left_out_whatever_the_plan(fair):
    for queue in ("c", "a", "d", "b"):
        tasks.nothing.using(queue_name=queue, fair="tenant" if queue in fair else None).enqueue()
    assert ready_queues("default") == {queue: queue in fair for queue in "abcd"}


@pytest.mark.usefixtures("without_indexes")
def test_the_functions_of_the_first_ready_tasks_of_each_queue_are_found(monkeypatch):
    found = []
    for queue, fair in (("fair", "tenant"), ("plain", None)):
        for task, args, priority in ((tasks.echo, (1,), 0), (tasks.nothing, (), 1)):
            task.using(queue_name=queue, fair=fair, priority=priority).enqueue(*args)
            found.append((queue, task.module_path))
    for _ in range(2):
        tasks.fail.using(queue_name="third").enqueue()
    found.append(("third", tasks.fail.module_path))
    assert sorted(ready_paths("default")) == found
    monkeypatch.setattr(ready, "MOST_READ", 1)
    assert sorted(ready_paths("default")) == [found[1], found[3], found[4]]


# Ready tasks whose functions no living worker knows.


def add(path, *, queue="default", status="READY", backend="default", hours=0):
    moment = Now() - timedelta(hours=hours)
    worker = {"worker": uuid4(), "last_attempted_at": Now()} if status == "RUNNING" else {}
    return Task.objects.create(
        queue=queue, task_path=path, status=status, backend=backend, enqueued_at=moment, **worker
    )


def start(*paths, silent_for=0):
    rows = {"pid": 1, "threads": 1, "queues": [], "heartbeat_at": Now() - timedelta(seconds=silent_for)}
    return Worker.objects.create(id=uuid4(), parent=uuid4(), task_paths=list(paths), **rows)


def found(**options):
    return [(each.task_path, each.queue, each.waiting) for each in unknown("default", **options)]


def test_functions_that_no_living_worker_knows_are_returned_the_oldest_first():
    start("a.known")
    start("a.forgotten", silent_for=100_000)
    for path, hours in (("a.known", 3), ("a.young", 1), ("a.forgotten", 2), ("a.young", 0)):
        add(path, hours=hours)
    add("a.running", status="RUNNING")
    assert found() == [("a.forgotten", "default", 1), ("a.young", "default", 2)]


def test_the_order_is_that_of_the_oldest_task_of_each_function():
    ages = {"a.e": 3, "a.c": 1, "a.a": 5, "a.d": 2, "a.b": 4, "a.f": 6}
    for path, hours in ages.items():
        add(path, hours=hours)
        add(path)
    assert [path for path, *_ in found()] == sorted(ages, key=ages.get, reverse=True)


def test_unknown_tasks_are_counted_up_to_a_limit_for_each_queue():
    for queue in ("mail", "bulk"):
        for _ in range(3):
            add("a.b", queue=queue)
    assert sorted(found(limit=2)) == [("a.b", "bulk", 2), ("a.b", "mail", 2)]


def test_unknown_tasks_can_be_filtered_by_worker_and_backend():
    mine, other = start("a.mine"), start("a.others")
    add("a.mine"), add("a.others", backend="second")
    assert found() == []
    assert found(worker=mine.pk) == [("a.others", "default", 1)]
    assert found(worker=other.pk) == [("a.mine", "default", 1)]
    assert found(worker=mine.pk, backend="default") == []
