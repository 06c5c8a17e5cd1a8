"""An idle worker is woken by notifications, and polls if it cannot listen."""

from __future__ import annotations

import time

import pytest
from django.db import transaction

from django_pglock.models import Task, Worker
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_an_idle_worker_is_woken_by_the_commit_and_not_before(worker, eventually, settings):
    """Without the notification, the worker would sleep for ten minutes."""
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 600.0}
    worker()
    eventually(lambda: Worker.objects.filter(is_sleeping=True).exists())
    time.sleep(0.3)
    with transaction.atomic():
        result = tasks.nothing.enqueue()
        time.sleep(0.2)
        assert Task.objects.get(pk=result.id).status == "READY"
    eventually(lambda: Task.objects.filter(pk=result.id, status="SUCCESSFUL").exists(), why="it was not woken")


def test_a_worker_whose_row_was_removed_is_woken_again_soon(worker, eventually):
    """As when the worker was frozen for too long. The next heartbeat writes the row anew, with the flag for sleep."""
    sleeps = Worker.objects.filter(is_sleeping=True)
    worker()
    eventually(sleeps.exists)
    Worker.objects.all().delete()
    eventually(sleeps.exists, why="it does not ask for news any more")


def test_a_worker_behind_a_pooler_polls(pooled, worker, finished):
    running = worker()
    assert not running.heartbeat.is_listening()
    assert Worker.objects.get().lock_key is None
    finished(tasks.nothing.enqueue())


def test_notifications_are_certain_only_if_the_listening_session_sends_the_heartbeats(worker, eventually):
    running = worker().heartbeat
    eventually(running.is_listening)
    running.beat_at -= 1000.0
    assert not running.is_listening(), "its last heartbeat may not have been answered"
    eventually(running.is_listening)
