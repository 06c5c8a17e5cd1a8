"""``--drain``: a worker ends when nothing is left that it could run."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from django.db import transaction

from django_pglock.models import Queue, Task, Worker
from django_pglock.worker.child.settler import Settler
from tests.db.worker.conftest import run_to_its_end, statuses
from tests.sample import tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


def drain(**options) -> None:
    run_to_its_end(drain=True, **options)


def test_a_draining_worker_ends_when_all_tasks_have_ended():
    with transaction.atomic():
        for number in range(50):
            tasks.record.enqueue("drained", number)
    drain()
    assert statuses() == {"SUCCESSFUL": 50}
    assert not Worker.objects.exists()


def test_a_draining_worker_without_tasks_ends_at_once(pooled):
    drain()


def test_drain_waits_for_tasks_in_flight_their_retries_and_dependents():
    """Second attempts are ready when the first have ended. A running task keeps the worker, while a thread is idle."""
    tasks.fail_twice.enqueue("again")
    tasks.note_and_sleep.enqueue("slow", 0.5)
    first = tasks.note_and_sleep.enqueue("first", 0.3)
    tasks.record.using(after=[first]).enqueue("follower")
    tasks.sleep_async.enqueue(0.5)
    drain()
    assert statuses() == {"SUCCESSFUL": 5}


def test_a_task_is_in_flight_until_its_followers_are_ready(monkeypatch):
    let_through = Settler._release_and_admit
    monkeypatch.setattr(Settler, "_release_and_admit", lambda *arguments: (time.sleep(0.3), let_through(*arguments)))
    tasks.record.using(after=[tasks.nothing.enqueue()]).enqueue("follower")
    drain()
    assert statuses() == {"SUCCESSFUL": 2}


def test_drain_waits_for_due_tasks_and_not_for_later_ones():
    tasks.record.using(run_after=timedelta(hours=1)).enqueue("later")
    for number in range(20):
        tasks.record.using(run_after=timedelta(milliseconds=1), lock="same").enqueue("due", number)
    drain()
    assert statuses() == {"SCHEDULED": 1, "SUCCESSFUL": 20}
    assert list(Effect.objects.order_by("id").values_list("number", flat=True)) == list(range(20)), "one key, in order"


def test_a_draining_worker_leaves_tasks_of_other_paused_and_unknown_kinds():
    tasks.record.using(queue_name="mail").enqueue("of another queue")
    tasks.record.using(queue_name="paused").enqueue("paused")
    Queue.objects.pause("paused")
    Task.objects.filter(pk=tasks.record.enqueue("unknown").id).update(task_path="shop.tasks.of_another_deploy")
    tasks.record.enqueue("mine")
    drain(queues=["default", "paused"])
    assert statuses() == {"READY": 3, "SUCCESSFUL": 1}
