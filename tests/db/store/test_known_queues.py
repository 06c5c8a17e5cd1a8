"""The names of queues, without those that have a row."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connection
from django.db.models.functions import Now

from django_pglock.models import Queue, QueueCount, Worker
from django_pglock.store.known_queues import queues_without_row
from django_pglock.store.shared_counts import shared_counts
from django_pglock.store.shared_failures import MAX_AGE_FOR_PAGES
from tests.db.admin.visits import make

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def nothing_is_known_of_other_tests(db):
    """TRUNCATE and a rollback leave the statistics of the queues of other tests."""
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM pg_statistic WHERE starelid = 'django_pglock_task'::regclass")


@pytest.mark.parametrize("status", ["READY", "RUNNING", "SCHEDULED", "BLOCKED", "FAILED"])
def test_a_queue_with_a_task_that_waits_runs_or_has_failed_is_known(status):
    make(status, queue="mail")
    make(status, queue="fair", fair_key="x")
    assert queues_without_row("default") == (["fair", "mail"], None)


@pytest.mark.usefixtures("without_indexes")
def test_no_queue_with_failed_tasks_is_left_out_whatever_the_plan():
    for queue in ("c", "a", "d", "b"):
        make("FAILED", queue=queue)
    assert queues_without_row("default").names == ["a", "b", "c", "d"]


def test_the_common_queues_of_finished_tasks_are_known_by_statistics():
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO django_pglock_task (queue, task_path, backend, status, finished_at)"
            " SELECT 'bulk', 'a.b', 'default', 'SUCCESSFUL', now() FROM generate_series(1, 100)"
        )
        cursor.execute("ANALYZE django_pglock_task")
    assert "bulk" in queues_without_row("default").names


def test_names_are_added_and_queues_with_a_row_are_left_out():
    for queue in ("mail", "paused"):
        make("READY", queue=queue)
    Queue.objects.pause("paused")
    assert queues_without_row("default", also=["default", "mail", "paused"]).names == ["default", "mail"]


def test_the_counts_of_a_worker_are_taken_while_they_are_young():
    for queue in ("counted", "paused"):
        make("FAILED", queue=queue)
    Queue.objects.pause("paused")
    Worker.objects.create(id=uuid4(), queues=[], threads=1, pid=7)
    shared_counts("default")
    make("FAILED", queue="younger")
    names, age = queues_without_row("default", also=["default"])
    assert names == ["counted", "default"]
    assert 0 <= age < MAX_AGE_FOR_PAGES
    assert queues_without_row("default").names == ["counted"]
    QueueCount.objects.filter(queue="paused").update(counted_at=Now() - timedelta(seconds=30))
    assert queues_without_row("default").age >= 30, "the age of the oldest count"
    QueueCount.objects.update(counted_at=Now() - timedelta(seconds=MAX_AGE_FOR_PAGES + 1))
    assert queues_without_row("default", also=["default"]) == (["counted", "default", "younger"], None)


def test_the_counts_of_workers_that_have_ended_are_not_taken():
    worker = Worker.objects.create(id=uuid4(), queues=[], threads=1, pid=7)
    shared_counts("default")
    make("READY", queue="younger")
    Worker.objects.update(heartbeat_at=Now() - timedelta(days=1))
    assert queues_without_row("default") == (["younger"], None)
    worker.delete()
    assert queues_without_row("default") == (["younger"], None)
