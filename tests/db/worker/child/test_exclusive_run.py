"""The exclusive run: a task that may have killed its workers gets one more attempt, alone."""

from __future__ import annotations

import threading
import time

import pytest
from django.db import transaction

from django_pglock.conf import get_settings
from django_pglock.models import Task
from django_pglock.worker.child import exclusive_run
from tests.sample import chaos_tasks, running_tasks
from tests.sample.models import Effect, Run

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_task_whose_workers_died_runs_alone(worker, eventually):
    """This task may be the one that kills workers. Other tasks in the process must not be lost with it again."""
    suspects = [int(chaos_tasks.work.enqueue(0.1).id) for _ in range(2)]
    Task.objects.update(rescues=get_settings().MAX_RESCUES)
    others = [int(chaos_tasks.work.enqueue(0.1).id) for _ in range(6)]
    worker(threads=4)
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == len(suspects + others))
    runs = list(Run.objects.order_by("started_at"))
    assert len(runs) == len(suspects + others), "nothing ran twice"
    for suspect in Run.objects.filter(task__in=suspects):
        beside = [run for run in runs if run.started_at < suspect.ended_at and run.ended_at > suspect.started_at]
        assert [run.pk for run in beside] == [suspect.pk]


def test_an_exclusive_run_does_not_keep_idle_threads_waiting_for_long(worker, eventually, monkeypatch, caplog, gate):
    """Another task runs for hours: the suspects are postponed, the others run, and each suspect runs alone later."""
    monkeypatch.setattr(exclusive_run, "WAIT_TIMEOUT", 1.0)
    running_tasks.wait_for_note.enqueue("go on")
    running = worker(threads=3)
    eventually(lambda: Effect.objects.filter(name="waits").exists())
    with transaction.atomic():
        suspects = [int(chaos_tasks.work.enqueue(0.05).id) for _ in range(3)]
        Task.objects.filter(pk__in=suspects).update(rescues=get_settings().MAX_RESCUES)
        others = [int(chaos_tasks.work.enqueue(0.01).id) for _ in range(10)]
    eventually(lambda: Task.objects.filter(pk__in=others, status="SUCCESSFUL").count() == 10, why="they wait")
    eventually(lambda: Task.objects.filter(pk__in=suspects, status="SCHEDULED").count() == 3, why="not put off")
    assert not Run.objects.filter(task__in=suspects).exists(), "it was not alone"
    assert sum("for the other tasks of this worker to end" in message for message in caplog.messages) == 1, (
        "each of them made the others wait"
    )
    claims = sum(Task.objects.filter(pk__in=suspects).values_list("attempts", flat=True))
    assert claims <= 10, "claimed and given back again and again"
    assert running.feeder._exclusive_run._timeout == 2.0

    gate()
    eventually(lambda: Task.objects.filter(pk__in=suspects, status="SUCCESSFUL").count() == 3)
    assert set(Task.objects.filter(pk__in=suspects).values_list("rescues", "retries")) == {(3, 0)}
    runs = list(Run.objects.all())
    for suspect in Run.objects.filter(task__in=suspects):
        beside = [run for run in runs if run.started_at < suspect.ended_at and run.ended_at > suspect.started_at]
        assert [run.pk for run in beside] == [suspect.pk]
    assert running.feeder._exclusive_run._timeout == 1.0, "the next one begins anew"


def test_a_draining_worker_does_not_postpone_an_exclusive_run(worker, eventually, monkeypatch, gate):
    """Otherwise the worker would end without running the task."""
    monkeypatch.setattr(exclusive_run, "WAIT_TIMEOUT", 0.05)
    running_tasks.wait_for_note.enqueue("go on")
    running = worker(threads=2, drain=True)
    eventually(lambda: Effect.objects.filter(name="waits").exists())
    with transaction.atomic():
        suspect = int(chaos_tasks.work.enqueue(0).id)
        Task.objects.filter(pk=suspect).update(rescues=get_settings().MAX_RESCUES)
    eventually(lambda: Task.objects.filter(pk=suspect, status="RUNNING").exists())
    time.sleep(0.3)
    assert Task.objects.get(pk=suspect).status == "RUNNING"
    gate()
    assert running.wait()
    assert running.shutdown() is True
    assert set(Task.objects.values_list("status", flat=True)) == {"SUCCESSFUL"}


def test_a_worker_that_ends_gives_back_a_task_that_waits_for_its_exclusive_run(worker, eventually, gate):
    running_tasks.wait_for_note.enqueue("go on")
    running = worker(threads=2, grace=60)
    eventually(lambda: Effect.objects.filter(name="waits").exists())
    with transaction.atomic():
        suspect = int(chaos_tasks.work.enqueue(0).id)
        Task.objects.filter(pk=suspect).update(rescues=get_settings().MAX_RESCUES)
    eventually(lambda: Task.objects.filter(pk=suspect, status="RUNNING").exists())
    ended = []
    ending = threading.Thread(target=lambda: ended.append(running.shutdown()))
    ending.start()
    eventually(lambda: Task.objects.filter(pk=suspect, status="READY").exists(), why="it was not given back")
    gate()
    ending.join(60)
    assert ended == [True]
    row = Task.objects.get(pk=suspect)
    assert (row.status, row.rescues) == ("READY", get_settings().MAX_RESCUES)
