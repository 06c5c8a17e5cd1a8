"""A worker starts and stops in order, gives back what it cannot finish, and ends when one of its parts has."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError

from django_pglock.errors import ConfigurationError
from django_pglock.models import Attempt as AttemptRow
from django_pglock.models import Task, Worker
from django_pglock.worker import Worker as WorkerUnderTest
from tests.db.worker.conftest import run_to_its_end
from tests.sample import running_tasks, tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_worker_leaves_no_trace_when_it_stops(worker):
    running = worker()
    assert Worker.objects.count() == 1
    assert running.shutdown() is True
    assert running.shutdown() is True, "twice does no harm"
    assert Worker.objects.count() == 0
    assert running.in_flight.claims == {}
    assert AttemptRow.objects.count() == 0


def test_a_shutdown_gives_back_claims_that_have_not_begun(worker, eventually):
    """With one thread and one long task, the other tasks are at most claimed. They are free again at once."""
    running = worker(threads=1, grace=60)
    for _ in range(50):
        tasks.nothing.enqueue()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 50)
    tasks.note_and_sleep.enqueue("long", 0.5)
    for _ in range(20):
        tasks.record.enqueue("after")
    eventually(lambda: Effect.objects.filter(name="long").exists())
    assert running.shutdown() is True
    assert not Task.objects.filter(status="RUNNING").exists()
    assert Task.objects.filter(task_path__endswith="note_and_sleep", status="SUCCESSFUL").exists()


def test_a_task_longer_than_the_grace_period_is_given_back(worker, eventually, gate):
    running = worker(threads=1, grace=0.2)
    running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.exists())
    assert running.shutdown() is False
    row = Task.objects.get()
    assert (row.status, row.retries, row.rescues) == ("SCHEDULED", 0, 0)
    assert row.run_after > row.last_attempted_at, "not while the process may still be at it"


def test_a_worker_that_waits_for_its_database_can_be_stopped(monkeypatch):
    monkeypatch.setattr("django_pglock.worker.service.dedicated_connection", refuse)
    worker = WorkerUnderTest(threads=1)
    thread = threading.Thread(target=worker.run)
    thread.start()
    time.sleep(0.3)
    worker.stop()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.usefixtures("own_registry")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_ends_when_one_of_its_services_has_ended(monkeypatch):
    """Otherwise the worker would continue to beat and to claim, without running all its duties."""

    tasks.nothing.enqueue()
    process = WorkerUnderTest(threads=1, grace=5)
    monkeypatch.setattr(process.upkeep, "_run_once_or_back_off", lambda: exec("raise SystemExit"))
    with pytest.raises(RuntimeError, match=r"The upkeep has ended\. The worker has ended, too\."):
        process.run()
    assert Task.objects.get().status == "SUCCESSFUL"
    assert not Worker.objects.exists()


def test_a_signal_during_the_shutdown_of_a_worker_counts_as_the_first(worker):
    """This signal lets running tasks finish. Only the next one ends them."""
    process = worker()
    process.retire()
    process.stop()
    assert not process._immediate_stop_requested.is_set()
    process.stop()
    assert process._immediate_stop_requested.is_set()


def test_a_signal_may_come_between_any_two_lines():
    """The handler runs in the thread that waits for the event, or that sets it, and must not wait for this thread."""
    process = WorkerUnderTest(threads=1)

    def handle(*args):
        process.stop()
        return handle

    def wait_and_end():
        sys.settrace(handle)
        process._stop_requested.wait(0.1)
        process.end()
        process._give_up_grace()
        sys.settrace(None)

    waiting = threading.Thread(target=wait_and_end, daemon=True)
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive(), "it waits for itself"
    assert process.is_stopping


def refuse(*args, **kwargs):
    raise OperationalError("not yet")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OperationalError("password authentication\nfailed"), "within 5 s: password authentication failed"),
        (None, "within 5 s: migrations of django_pglock are pending (0001_initial). Run: manage.py migrate django"),
    ],
)
def test_a_draining_worker_does_not_wait_for_its_database_without_end(monkeypatch, caplog, error, said):
    """Otherwise a cron job would hang."""

    def pending(using):
        if error is not None:
            raise error
        return ["0001_initial"]

    monkeypatch.setattr("django_pglock.worker.liveness.heartbeat.pending_migrations", pending)
    ended = run_to_its_end(drain=True)
    assert ended.left_behind == ["what it could not read"]
    assert f"This worker ends, because it could not use the database 'default' {said}" in caplog.text


@pytest.mark.django_db(transaction=False)
@pytest.mark.parametrize("start", [lambda: WorkerUnderTest(drain=True).run(), lambda: call_command("runlockworker")])
def test_a_worker_that_would_see_no_task_of_its_test_says_so(start):
    """In a TestCase, run() would do nothing and return True."""
    tasks.nothing.enqueue()
    with pytest.raises((ConfigurationError, CommandError), match="use a TransactionTestCase"):
        start()
