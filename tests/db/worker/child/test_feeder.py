"""The feeder: what it claims, when, and what it gives back."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from django.db import OperationalError, connection, transaction

from django_pglock.models import Task
from django_pglock.models import Worker as WorkerRow
from django_pglock.store.wake import NEGATIVE_TTL
from django_pglock.tasks.compat import TaskResultStatus
from django_pglock.worker.child.claimer import ALL, SYNC
from tests.db.worker.conftest import make_feeder
from tests.sample import running_tasks, tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


def test_higher_priorities_run_first(worker, finished):
    for number, priority in enumerate((0, 10, -10, 10)):
        result = tasks.record.using(priority=priority).enqueue("order", number)
    worker(threads=1)
    finished(result)
    # The last ones may still be to come, also between two polls.
    found = [effect.number for effect in Effect.objects.order_by("id")]
    assert len(found) >= 2
    assert found == [1, 3, 0, 2][: len(found)]


def test_a_worker_serves_only_the_queues_of_its_option(worker, finished):
    other = tasks.nothing.using(queue_name="other").enqueue()
    worker(queues=["default", "mail"])
    finished(tasks.nothing.using(queue_name="mail").enqueue())
    other.refresh()
    assert other.status == TaskResultStatus.READY


def test_a_worker_without_queues_serves_all(worker, finished):
    results = [tasks.nothing.using(queue_name=name).enqueue() for name in ("a", "b", "a", "c")]
    worker()
    for result in results:
        finished(result)


def test_a_worker_whose_heartbeats_do_not_arrive_claims_nothing(worker, finished, eventually, monkeypatch):
    """As when the server refuses new sessions: others would take what it claims from it, while it runs."""
    here = worker()
    finished(tasks.nothing.enqueue())
    allowed = threading.Event()
    heartbeat = here.crew.heartbeat
    connect = heartbeat.open
    monkeypatch.setattr(heartbeat, "open", lambda: connect() if allowed.is_set() else refuse())
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'lockworker heartbeat'"
        )
    eventually(lambda: not here.child.heartbeat.is_alive(), why="the heartbeat has a session all the time")
    result = tasks.nothing.enqueue()
    time.sleep(0.5)
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        [heard_since] = cursor.fetchone()
    allowed.set()
    finished(result)
    row = Task.objects.get(pk=result.id)
    assert (row.attempts, row.rescues) == (1, 0)
    assert row.started_at > heard_since, "claimed by a worker that counts as dead"


def refuse():
    raise OperationalError("sorry, too many clients already")


def test_a_scheduled_task_runs_when_it_is_due_without_a_poll(worker, finished, eventually, settings):
    """Without the timer of the next due task it would be ten minutes late."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 600.0, "POLL_INTERVAL": 600.0}
    worker()
    eventually(WorkerRow.objects.filter(is_sleeping=True).exists)
    # This process may have seen a moment ago that no worker sleeps. Then it would notify none of the task.
    time.sleep(NEGATIVE_TTL)
    result = finished(tasks.nothing.using(run_after=timedelta(seconds=0.5)).enqueue())
    row = Task.objects.get(pk=result.id)
    assert row.last_attempted_at >= row.run_after


def test_waiting_claims_are_given_back_for_an_idle_worker(worker, eventually, gate):
    """The first worker has learnt that tasks are quick and claims ahead; then a long one blocks its only thread."""
    worker(threads=1, grace=0)
    for _ in range(300):
        tasks.nothing.enqueue()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 300)
    with transaction.atomic():
        running_tasks.wait_for_note.enqueue("go on")
        for number in range(30):
            tasks.record.enqueue("quick", number)
    eventually(lambda: Effect.objects.filter(name="waits").exists())
    worker(threads=1)
    eventually(lambda: Effect.objects.filter(name="quick").count() == 30, why="they were hoarded")
    running = Task.objects.filter(status="RUNNING").values_list("task_path", flat=True)
    long = running_tasks.wait_for_note.module_path
    eventually(lambda: list(running.all()) == [long], why="the long one still runs")
    assert set(Effect.objects.filter(name="quick").values_list("number", flat=True)) == set(range(30))


def test_waiting_claims_are_given_back_while_longer_tasks_end_one_by_one(worker, eventually, monkeypatch):
    """Each end within 0.2 s is progress, but the tasks behind it wait for seconds."""
    in_flight, given_back = worker(threads=1, grace=0).in_flight, []
    give_back = in_flight.give_back_waiting
    monkeypatch.setattr(in_flight, "give_back_waiting", lambda: given_back.append(give_back()))
    # As after many short tasks.
    in_flight.threads.cost = 1e-6
    with transaction.atomic():
        for _ in range(40):
            running_tasks.run_sql.enqueue(0.06)
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 40)
    assert sum(given_back) > 10


def enqueue_silently(queue):
    """Make a ready task without a notification."""
    return Task.objects.create(queue=queue, backend="default", task_path=tasks.nothing.module_path)


@pytest.mark.parametrize("kind", [ALL, SYNC])
def test_a_notification_of_one_queue_hides_no_task_of_another(kind):
    """The worker was not notified of tasks that were ready before it asked for notifications."""
    feeder = make_feeder(names=["a", "b"])
    feeder._ask()
    enqueue_silently("a")
    feeder.note_ready("b")
    feeder._hear()
    assert [claim.queue for claim in feeder._claim(kind, 2)] == ["a"]
