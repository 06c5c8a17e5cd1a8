"""Ready tasks whose functions no living worker knows."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.db.models.functions import Now

from django_pglock.models import Task, Worker
from django_pglock.store.ready import unknown

pytestmark = pytest.mark.django_db


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
