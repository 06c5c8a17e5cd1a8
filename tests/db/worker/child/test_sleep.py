"""A worker that cannot take what it was notified of wakes others."""

from __future__ import annotations

import pytest

from django_pglock.models import Task, Worker
from django_pglock.worker.child import feeder as module
from tests.db.worker.conftest import make_feeder
from tests.sample import running_tasks, tasks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def two(worker, eventually, settings):
    """Return two sleeping workers. The next poll comes in ten minutes."""
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 600.0}
    pair = worker(threads=1), worker(threads=1, queues=["default"])
    eventually(lambda: Worker.objects.filter(is_sleeping=True).count() == 2)
    # Until both have made the last poll before they sleep.
    for each in pair:
        eventually(lambda each=each: each.feeder._is_rest_empty)
    return pair


def notify(worker):
    """Make a ready task, of which only this worker is notified."""
    row = Task.objects.create(queue="default", backend="default", task_path=tasks.nothing.module_path)
    worker.feeder.note_ready("default")
    return Task.objects.filter(pk=row.pk, status="SUCCESSFUL")


def test_a_worker_without_a_free_thread_wakes_others(two, eventually):
    first, other = two
    running_tasks.wait_for_note.using(queue_name="of the first").enqueue("the end")
    eventually(lambda: first.in_flight.threads.running == 1)
    for _ in range(3):
        assert eventually(notify(first).first).worker == other.id
    assert not Worker.objects.get(pk=first.id).is_sleeping, "others would go on to rely on it"
    running_tasks.note("the end")
    eventually(Worker.objects.filter(pk=first.id, is_sleeping=True).exists)


def test_a_task_that_a_worker_may_not_run_is_claimed_by_others(two, eventually):
    """The worker does not know the function, or serves another backend."""
    first, other = two
    first.feeder.claimer.backend = "another"
    first.feeder.claimer._known = -1
    assert eventually(notify(first).first).worker == other.id


def test_a_notification_that_comes_during_a_poll_is_kept(monkeypatch):
    """The poll may not have seen its task. Before, the end of the poll forgot to wake others for it."""
    feeder, woken = make_feeder(), []
    monkeypatch.setattr(module, "wake_others", lambda using, queues, *others, **hops: woken.append(queues))
    feeder.note_ready("a")
    feeder._hear()
    feeder.note_ready("b")
    feeder._wake_others_if(False)
    feeder._leave_to_others()
    assert woken == [["b"]]
