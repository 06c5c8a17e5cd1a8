"""The exclusive run: a task that may have killed its workers gets one more attempt, alone."""

from __future__ import annotations

import threading
import time

import pytest
from django.db import transaction

from django_pglock.conf import get_settings
from django_pglock.models import Task
from django_pglock.worker.child import feeder
from tests.sample import chaos_tasks, running_tasks
from tests.sample.models import Effect, Run

pytestmark = pytest.mark.django_db(transaction=True)


def enqueue_suspects(count=1):
    """Enqueue tasks that may be the ones that kill workers, and return their rows."""
    ids = [int(chaos_tasks.work.enqueue(0.05).id) for _ in range(count)]
    suspects = Task.objects.filter(pk__in=ids)
    suspects.update(rescues=get_settings().MAX_RESCUES)
    return suspects


def ran_alone(suspects):
    """Return whether each of these tasks ran once, and while it ran no other task did."""
    runs = list(Run.objects.all())
    return all(
        [run for run in runs if run.started_at < own.ended_at and run.ended_at > own.started_at] == [own]
        for own in (Run.objects.get(task=suspect.pk) for suspect in suspects)
    )


@pytest.fixture
def busy(worker, eventually, gate):
    """Start a worker one of whose threads is busy until the gate opens."""

    def start(**options):
        running_tasks.wait_for_note.enqueue("go on")
        running = worker(**options)
        eventually(lambda: Effect.objects.filter(name="waits").exists())
        return running

    return start


def test_a_task_whose_workers_died_runs_alone(worker, eventually):
    """Other tasks in the process must not be lost with it again."""
    suspects = enqueue_suspects(2)
    for _ in range(6):
        chaos_tasks.work.enqueue(0.1)
    worker(threads=4)
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 8)
    assert Run.objects.count() == 8, "nothing ran twice"
    assert ran_alone(suspects)


def test_an_exclusive_run_does_not_keep_idle_threads_waiting_for_long(busy, eventually, monkeypatch, caplog, gate):
    """Another task runs for hours: the suspects are postponed, the others run, and each suspect runs alone later."""
    monkeypatch.setattr(feeder, "WAIT_TIMEOUT", 1.0)
    running = busy(threads=3)
    with transaction.atomic():
        suspects = enqueue_suspects(3)
        others = [int(chaos_tasks.work.enqueue(0.01).id) for _ in range(10)]
    eventually(lambda: Task.objects.filter(pk__in=others, status="SUCCESSFUL").count() == 10, why="they wait")
    eventually(lambda: suspects.filter(status="SCHEDULED").count() == 3, why="not postponed")
    assert not Run.objects.filter(task__in=[row.pk for row in suspects]).exists(), "it was not alone"
    waits = sum("for the other tasks of this worker to end" in message for message in caplog.messages)
    assert waits == 1, "each of them made the others wait"
    assert sum(row.attempts for row in suspects) <= 10, "claimed and given back again and again"
    assert running.feeder._exclusive_run._timeout == 2.0
    gate()
    eventually(lambda: suspects.filter(status="SUCCESSFUL").count() == 3)
    assert set(suspects.values_list("rescues", "retries")) == {(3, 0)}
    assert ran_alone(suspects)
    assert running.feeder._exclusive_run._timeout == 1.0, "the next one begins anew"


def test_a_draining_worker_does_not_postpone_an_exclusive_run(busy, eventually, monkeypatch, gate):
    """Otherwise the worker would end without running the task."""
    monkeypatch.setattr(feeder, "WAIT_TIMEOUT", 0.05)
    running = busy(threads=2, drain=True)
    with transaction.atomic():
        suspects = enqueue_suspects()
    eventually(lambda: suspects.get().status == "RUNNING")
    time.sleep(0.3)
    assert suspects.get().status == "RUNNING"
    gate()
    assert running.wait()
    assert running.shutdown() is True
    assert set(Task.objects.values_list("status", flat=True)) == {"SUCCESSFUL"}


def test_a_worker_that_ends_gives_back_a_task_that_waits_for_its_exclusive_run(busy, eventually, gate):
    running, ended = busy(threads=2, grace=60), []
    with transaction.atomic():
        suspects = enqueue_suspects()
    eventually(lambda: suspects.get().status == "RUNNING")
    ending = threading.Thread(target=lambda: ended.append(running.shutdown()))
    ending.start()
    eventually(lambda: suspects.get().status == "READY", why="it was not given back")
    gate()
    ending.join(60)
    assert ended == [True]
    assert (suspects.get().status, suspects.get().rescues) == ("READY", get_settings().MAX_RESCUES)
