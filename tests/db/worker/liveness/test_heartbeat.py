"""The service that sends the heartbeats of a worker."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from django_pglock.models import Worker
from django_pglock.store.liveness import (
    beat_all,
)
from django_pglock.worker.liveness import heartbeat
from tests.conftest import NEVER

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_worker_whose_row_was_removed_gets_it_back_at_its_next_beat(worker, eventually):
    running = worker()
    functions = Worker.objects.get().task_paths
    assert functions
    beats = []
    running.heartbeat.on_beat = lambda: beats.append(Worker.objects.filter(task_paths=functions).exists())
    eventually(lambda: beats)
    Worker.objects.all().delete()
    beats.clear()
    eventually(lambda: len(beats) > 1)
    # The last beat, if it was being sent, may have been written before the row was removed.
    assert all(beats[1:])


def test_a_heartbeat_is_as_old_as_its_statement(worker, eventually, monkeypatch):
    """A worker that was stopped while it waited for the answer must not regard its heartbeat as recent."""
    began = []

    def slow(using, beats):
        began.append(time.monotonic())
        time.sleep(0.1)
        return beat_all(using, beats)

    monkeypatch.setattr(heartbeat, "beat_all", slow)
    running, in_time = worker(), []
    running.heartbeat.on_beat = lambda: in_time.append(running.heartbeat.beat_at <= began[-1])
    eventually(lambda: in_time)
    assert all(in_time)


@pytest.mark.parametrize(("interval", "seconds"), [(3.0, 27.0), (10.0, 90.0)])
def test_a_worker_claims_nothing_as_soon_as_others_may_take_its_tasks_back(worker, settings, interval, seconds):
    running = worker()
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": interval}
    running.heartbeat.stop()
    assert running.heartbeat.wait(NEVER)
    running.heartbeat._answer, running.heartbeat.supervisor = object(), SimpleNamespace(is_up=True)
    now = time.monotonic()
    for age, counts_as_alive in ((seconds - 1, True), (seconds + 1, False)):
        running.heartbeat.beat_at = now - age
        assert running.heartbeat.check_heartbeat() is counts_as_alive
    running.heartbeat.supervisor = None
