"""A worker that is not on duty does rounds of upkeep rarely, and takes over at once when an older worker is gone."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connection
from django.db.models.functions import Now

from django_pglock.models import Task, Worker
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store.liveness import ON_DUTY
from django_pglock.store.wake import READY_CHANNEL
from django_pglock.worker.upkeep import queue_counts, upkeep
from tests.conftest import NEVER
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def older_workers():
    """Workers that have begun before and beat for a long time."""
    row = {"pid": 7, "queues": [], "threads": 1, "started_at": Now() - timedelta(days=1)}
    future = Now() + timedelta(days=1)
    return [Worker.objects.create(id=uuid4(), heartbeat_at=future, **row).pk for _ in range(ON_DUTY)]


def test_a_worker_that_is_not_on_duty_takes_over_when_an_older_one_is_gone(
    worker, eventually, older_workers, monkeypatch
):
    """Else the tasks of the older worker would wait for the next round, which is far away for such a worker."""
    monkeypatch.setattr(upkeep, "OFF_DUTY_FACTOR", 1_000_000)
    running = worker()
    eventually(lambda: running.upkeep._older_workers == ON_DUTY)
    eventually(lambda: running.upkeep.awake_by - running.upkeep._began_at > 10_000, why="it does not rest")
    orphan = Task.objects.create(
        queue="default",
        backend="default",
        task_path=tasks.nothing.module_path,
        status="RUNNING",
        attempts=1,
        worker=older_workers[0],
        started_at=Now(),
        last_attempted_at=Now(),
    )
    Worker.objects.filter(pk=older_workers[0]).delete()
    eventually(lambda: Task.objects.filter(pk=orphan.pk, status="SUCCESSFUL").exists(), why="nobody has rescued it")


def test_off_duty_a_worker_seldom_sees_to_the_counts(older_workers, monkeypatch):
    asked = []
    monkeypatch.setattr(queue_counts, "keep_counts", asked.append)
    service = upkeep.Upkeep("default", uuid4(), promoted=lambda: None)
    service.queue_counts._kept_at -= 2 * queue_counts.CHECK_INTERVAL
    service.stop()
    service.set_older_workers(ON_DUTY)
    service.turn()
    assert asked == []
    service.set_older_workers(0)
    service.stop()
    service.turn()
    assert asked == ["default"]


def test_rounds_off_duty_are_rare_and_spread(older_workers):
    service = upkeep.Upkeep("default", uuid4(), promoted=lambda: None)
    often = service._between_rounds
    service.set_older_workers(ON_DUTY)
    rarely = {service._between_rounds for _ in range(10)}
    assert min(rarely) > 5 * often
    assert len(rarely) > 1
    service.queue_counts.ask()
    assert service._between_rounds == often, "somebody reads the metrics of this worker"


@pytest.mark.parametrize(("older_workers", "expected"), [(0, ["default", "the end"]), (1, ["the end"])])
def test_the_oldest_worker_notifies_of_tasks_of_which_nobody_was_notified(older_workers, expected):
    """So all other workers need to poll only rarely."""
    Worker.objects.create(id=uuid4(), pid=7, queues=[], threads=1, is_sleeping=True)
    Task.objects.create(queue="default", backend="default", task_path=tasks.nothing.module_path)
    listener = dedicated_connection("default")
    with listener.cursor() as cursor:
        cursor.execute(f"LISTEN {READY_CHANNEL}")
    service = upkeep.Upkeep("default", uuid4(), promoted=lambda: None)
    service.set_older_workers(older_workers)
    service._round()
    service._searched_unnoticed_at = -1_000_000.0
    service._round()
    service._round()
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, 'the end')", [READY_CHANNEL])
    heard = []
    for note in listener.connection.notifies(timeout=NEVER):
        heard.append(note.payload)
        if note.payload == "the end":
            break
    listener.close()
    assert heard == expected
