"""A notification makes a few sleeping workers poll. They wake the others if they cannot take all tasks."""

from __future__ import annotations

import time

import pytest
from django_pglock.worker.liveness import listener

from django_pglock.models import Task, Worker
from tests.sample import running_tasks, tasks

pytestmark = pytest.mark.django_db(transaction=True)

NEVER = 1e9


@pytest.fixture
def two(worker, eventually, settings):
    """Return two sleeping workers. The second one polls only when the first one wakes it, or after a pause."""
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 600.0}

    def make(**options):
        pair = worker(**options), worker(threads=1)
        for running, is_woken_first in zip(pair, (True, False), strict=True):
            running.heartbeat.on_reply = lambda reply: None
            running.heartbeat.listener.is_woken_first = is_woken_first
            running.sleep.has_delayed_workers = is_woken_first
        eventually(lambda: Worker.objects.filter(is_sleeping=True).count() == 2)
        # Wait until both have made the last poll before they sleep.
        time.sleep(0.5)
        return pair

    return make


def test_a_worker_woken_first_without_a_free_thread_wakes_the_others(two, monkeypatch, finished, eventually):
    monkeypatch.setattr(listener, "POSTPONED_FOR", NEVER)
    first, other = two(threads=1)
    running_tasks.wait_for_note.enqueue("the end")
    eventually(lambda: first.in_flight.threads.running == 1)
    for _ in range(3):
        finished(tasks.nothing.enqueue())
    assert set(Task.objects.filter(status="SUCCESSFUL").values_list("worker", flat=True)) == {other.id}
    assert not Worker.objects.get(pk=first.id).is_sleeping, "others would go on to rely on it"
    running_tasks.note("the end")
    eventually(Worker.objects.filter(pk=first.id, is_sleeping=True).exists)


def test_a_task_that_the_worker_woken_first_may_not_run_is_claimed_by_others(two, monkeypatch, finished):
    """The workers woken first do not know the function, or serve another backend."""
    monkeypatch.setattr(listener, "POSTPONED_FOR", 0.5)
    first, other = two(threads=1)
    first.fetcher.claimer.backend = "another"
    first.fetcher.claimer._cursors = {}
    finished(tasks.nothing.enqueue())
    assert Task.objects.get().worker == other.id
