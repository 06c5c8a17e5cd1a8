"""Requests for running tasks reach the worker, by notification or by poll, and only while there are such tasks."""

from __future__ import annotations

import pytest

from django_pglock.models import Attempt, Task, Worker
from tests.db.store.test_cancel import wait_until_begun
from tests.db.worker.conftest import wait_for_end
from tests.sample import running_tasks as running
from tests.sample import tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


def test_polling_finds_a_cancel_without_a_notification(pooled, worker, eventually):
    worker()
    result = running.run_sql.enqueue()
    wait_until_begun(eventually)
    Task.objects.cancel()
    assert wait_for_end(result, eventually).status == "CANCELLED"


def test_a_claim_that_waits_for_its_thread_does_not_begin(worker, eventually, claim, monkeypatch):
    """Several claims are in flight, and the only thread is busy."""
    monkeypatch.setattr("django_pglock.worker.child.fetcher.LONGEST_WAIT", running.FOREVER)
    process = worker(queues=["another"], threads=1)
    # A fetcher that has just connected gives unknown claims back.
    eventually(lambda: Worker.objects.filter(is_sleeping=True).exists())
    tasks.record.enqueue("never")
    [waits] = claim(worker=process.identity.id)
    running.wait_for_note.enqueue("go on")
    [busy] = claim(worker=process.identity.id)
    process.in_flight.begin_all([busy, waits])
    Task.objects.filter(pk=waits.id).cancel()
    eventually(lambda: waits.is_cancelled, why="it has not heard of it")
    running.note("go on")
    eventually(lambda: Task.objects.filter(pk=waits.id, status="CANCELLED").exists())
    assert not Effect.objects.filter(name="never").exists()
    assert Attempt.objects.get(task=waits.id).exception_path == "django_pglock.errors.TaskCancelled"
    eventually(lambda: Task.objects.filter(pk=busy.id, status="SUCCESSFUL").exists())
