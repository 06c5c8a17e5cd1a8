"""Requests for running tasks reach the worker, by notification or by poll, and only while there are such tasks."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from django_pglock.models import Attempt, Task, Worker
from django_pglock.store.requests_to_worker import Requests
from django_pglock.worker import Worker as WorkerUnderTest
from tests.db.store.test_cancel import wait_until_begun
from tests.db.worker.conftest import wait_for_end
from tests.sample import running_tasks as running
from tests.sample import tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("listens", [True, False])
def test_polling_finds_a_cancel_without_a_notification(worker, eventually, monkeypatch, listens):
    monkeypatch.setattr("django_pglock.worker.liveness.running_tasks.RunningTasks.receive_request", lambda *args: None)
    worker(listens=listens)
    result = running.run_sql.enqueue()
    wait_until_begun(eventually)
    Task.objects.cancel()
    assert wait_for_end(result, eventually).status == "CANCELLED"


def test_a_claim_that_waits_for_its_thread_does_not_begin(worker, eventually, claim, monkeypatch):
    """Several claims are in flight, and the only thread is busy."""
    monkeypatch.setattr("django_pglock.worker.claiming.fetcher.LONGEST_WAIT", running.FOREVER)
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


def test_a_worker_without_tasks_does_not_query_for_requested_cancels(worker, monkeypatch):
    """A worker queries requests once in an interval, and only while it runs tasks."""
    asked = []
    monkeypatch.setattr(
        "django_pglock.worker.liveness.running_tasks.requests_to",
        lambda using, worker: asked.append(worker) or Requests([], []),
    )
    process = worker(queues=["another"])
    process.running_tasks.wake()
    time.sleep(0.7)
    assert asked == []
    assert process.executor.watchdog._thread is None


def test_only_a_notification_about_a_task_in_flight_causes_a_query(claim, monkeypatch):
    """Each worker is notified of each cancel."""
    running_tasks, woken = WorkerUnderTest().running_tasks, []
    monkeypatch.setattr(running_tasks, "wake", lambda: woken.append(1))
    tasks.nothing.enqueue()
    [mine] = claim()
    running_tasks.in_flight.claims[mine.id, mine.attempt] = mine
    for task in (f"{mine.id + 1}", f"{mine.id}0", "", "no number"):
        running_tasks.receive_request(task)
    assert woken == []
    running_tasks.receive_request(f"{mine.id}")
    assert woken == [1]


@pytest.mark.parametrize("has_claims", [False, True])
def test_a_pass_without_work_takes_no_session(claim, monkeypatch, has_claims):
    """A worker behind a pooler has few sessions. This service needs one at most once in a heartbeat interval."""
    running_tasks, taken = WorkerUnderTest().running_tasks, []
    monkeypatch.setattr(running_tasks, "_take", lambda: taken.append(1) or 1 / 0)
    monkeypatch.setattr(running_tasks, "_wait_for_query", lambda: None)
    running_tasks.process = SimpleNamespace(needs_instructions=False)
    if has_claims:
        tasks.nothing.enqueue()
        [mine] = claim()
        running_tasks.in_flight.claims[mine.id, mine.attempt] = mine
        running_tasks._check_at = time.monotonic() + 1000.0
    running_tasks.open()
    running_tasks.run_once()
    assert taken == []
    if has_claims:
        running_tasks.wake()
        with pytest.raises(ZeroDivisionError):
            running_tasks.run_once()
