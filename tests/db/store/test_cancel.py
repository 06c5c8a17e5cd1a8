"""Cancelling: waiting tasks never run, and running tasks are asked to end."""

from __future__ import annotations

import math
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_pglock.models import Attempt, Task
from django_pglock.store.outcome import (
    Abandoned,
    Cancelled,
    Failed,
    GivenBack,
    Interrupted,
    Retried,
    Snoozed,
    Succeeded,
)
from django_pglock.store.requests_to_worker import REQUESTS
from django_pglock.store.rescue import rescue
from django_pglock.store.settle import give_back, settle
from django_pglock.store.statements import run
from tests.db.store.endings import FAILURE, statuses
from tests.db.worker.conftest import wait_for_end
from tests.sample import running_tasks as running
from tests.sample import tasks
from tests.sample.models import Effect
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


def wait_until_begun(eventually, name="begun"):
    eventually(lambda: Effect.objects.filter(name=name).exists(), why="it did not begin")


# The verb


def test_cancel_ends_waiting_tasks_and_requests_the_end_of_running_tasks(claim):
    tasks.nothing.enqueue()
    [mine] = claim()
    tasks.nothing.enqueue()
    assert Task.objects.cancel() == 2
    runs, waits = Task.objects.order_by("id")
    assert (runs.status, runs.finished_at) == ("RUNNING", None)
    assert runs.cancel_requested_at is not None
    assert (waits.status, waits.cancel_requested_at) == ("CANCELLED", None)
    assert Task.objects.cancel() == 0, "asked is asked"
    Task.objects.filter(pk=waits.pk).update(status="FAILED")
    with transaction.atomic():
        assert Task.objects.cancel() == 0, "a failed task is discarded, not cancelled"
    assert Task.objects.get(pk=mine.id).cancel_requested_at == runs.cancel_requested_at


@pytest.mark.parametrize("runs", [True, False])
def test_only_the_cancel_of_a_running_task_notifies_after_the_commit(claim, runs):
    tasks.nothing.enqueue()
    if runs:
        claim()
    with CaptureQueriesContext(connection) as queries:
        with transaction.atomic():
            Task.objects.cancel()
            assert not any("pg_notify" in query["sql"] for query in queries)
        assert any("pg_notify" in query["sql"] for query in queries) is runs


@pytest.mark.parametrize("runs", [True, False])
def test_cancel_tries_again_if_a_row_is_briefly_locked(claim, in_threads, monkeypatch, runs):
    """The row is locked because its progress is written, or because it is claimed."""
    mine = tasks.nothing.enqueue()
    if runs:
        claim()
    locked, left_out, free = threading.Event(), threading.Event(), threading.Event()

    def rest(seconds):
        left_out.set()
        assert free.wait(60)

    monkeypatch.setattr("django_pglock.store.operate.time", SimpleNamespace(sleep=rest))

    def work(number):
        if number == 0:
            with transaction.atomic():
                Task.objects.select_for_update().get(pk=mine.id)
                locked.set()
                assert left_out.wait(60)
            free.set()
            return None
        assert locked.wait(60)
        return Task.objects.cancel()

    assert in_threads(work, 2)[1] == 1


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Succeeded(), "SUCCESSFUL"),
        (Failed(FAILURE), "FAILED"),
        (Cancelled(FAILURE), "CANCELLED"),
        (Retried(FAILURE, 60), "CANCELLED"),
        (Retried(FAILURE, 0), "CANCELLED"),
        (Snoozed(60), "CANCELLED"),
        (Interrupted(FAILURE, 60), "CANCELLED"),
        (GivenBack(), "CANCELLED"),
        (Abandoned(60), "CANCELLED"),
    ],
)
def test_a_task_with_a_requested_cancel_does_not_run_again(claim, outcome, status):
    tasks.nothing.using(keep_result=60).enqueue()
    [mine] = claim()
    Task.objects.cancel()
    assert settle("default", [(mine, outcome)], mine.worker)[mine.id] is not None
    row = Task.objects.get()
    assert (row.status, row.worker) == (status, mine.worker)
    assert abs(row.expires_at - row.finished_at - timedelta(minutes=1)) < timedelta(seconds=1)
    assert run("default", REQUESTS, [mine.worker]) == [], "it has ended"
    assert Attempt.objects.count() == (not isinstance(outcome, (Succeeded, Snoozed, GivenBack, Abandoned)))


@pytest.mark.parametrize("verb", ["rescue", "reset_stuck", "give_back"])
def test_a_task_with_a_requested_cancel_is_cancelled_when_its_worker_is_gone(claim, verb):
    tasks.nothing.using(keep_result=60).enqueue()
    [mine] = claim()
    tasks.nothing.using(after=[mine.id]).enqueue()
    Task.objects.cancel()
    ends = {
        "rescue": lambda: rescue("default", unbroken=math.inf),
        "reset_stuck": Task.objects.reset_stuck,
        "give_back": lambda: give_back("default", mine.worker, [], older_than=0),
    }
    assert ends[verb]()
    assert statuses() == ["CANCELLED", "CANCELLED"]
    assert Task.objects.get(pk=mine.id).expires_at is not None, "keep_result is counted from this end, too"


def test_the_next_task_of_the_key_begins_when_the_cancelled_one_has_ended(worker, eventually):
    """Before, the next task began at once, while the cancelled one still ran."""
    first = running.locked.enqueue("a", running.FOREVER)
    second = running.locked.enqueue("a")
    worker()
    wait_until_begun(eventually, "locked a")
    Task.objects.filter(pk=first.id).cancel()
    assert wait_for_end(first, eventually).status == "CANCELLED"
    row = wait_for_end(second, eventually)
    assert row.status == "SUCCESSFUL"
    assert row.started_at >= Task.objects.get(pk=first.id).finished_at


# The running function


def test_a_cancelled_running_task_ends_without_a_retry(worker, eventually, slow_beats):
    worker(threads=4)
    functions = (running.run_sql, running.ask, running.wait_in_coroutine, running.fail_when_asked)
    results = [function.enqueue() for function in functions]
    eventually(lambda: Effect.objects.filter(name="begun").count() == len(functions), why="they did not begin")
    time.sleep(0.05)
    assert Task.objects.cancel() == len(functions)
    for result in results:
        row = wait_for_end(result, eventually)
        assert (row.status, row.attempts, row.retries) == ("CANCELLED", 1, 0), result.task
        attempt = Attempt.objects.get(task=row)
        assert (attempt.outcome, attempt.exception_path) == ("FAILED", "django_pglock.errors.TaskCancelled")
        result.refresh()
        assert [error.exception_class.__name__ for error in result.errors] == ["TaskCancelled"]
    # The traceback contains the exception of the function, too.
    assert "ValueError: in the middle of stopping" in attempt.traceback


def test_a_task_that_ignores_its_cancel_can_succeed(worker, eventually):
    worker()
    result = running.finish_anyway.enqueue()
    wait_until_begun(eventually)
    Task.objects.cancel()
    row = wait_for_end(result, eventually)
    assert (row.status, row.result) == ("SUCCESSFUL", "done")


def test_the_cancel_of_an_atomic_task_rolls_back(worker, eventually):
    worker()
    result = running.run_sql_atomically.enqueue()
    sleeping = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep(%%' AND state = 'active'"

    def sleeps():
        return execute_sql(sleeping)[0][0]

    eventually(sleeps)
    Task.objects.cancel()
    assert wait_for_end(result, eventually).status == "CANCELLED"
    assert not Effect.objects.exists()


def test_a_call_for_a_group_ends_when_all_its_tasks_are_cancelled(worker, eventually):
    results = [running.together.enqueue(key=1) for _ in range(3)]
    worker()
    wait_until_begun(eventually)
    assert Effect.objects.get().number == 3
    Task.objects.filter(pk=results[0].id).cancel()
    # One heartbeat later, the group still runs for the two other tasks.
    time.sleep(0.7)
    assert set(Task.objects.values_list("status", flat=True)) == {"RUNNING"}
    Task.objects.cancel()
    for result in results:
        assert wait_for_end(result, eventually).status == "CANCELLED"


def test_cancelling_one_task_of_a_group_does_not_cancel_the_others(worker, eventually):
    results = [running.together.enqueue(key=1) for _ in range(3)]
    worker()
    wait_until_begun(eventually)
    Task.objects.filter(pk=results[0].id).cancel()
    running.note("go on")
    assert [wait_for_end(result, eventually).status for result in results] == ["SUCCESSFUL"] * 3


def test_the_worker_continues_with_other_tasks(worker, eventually):
    """Nothing of the cancel is left in the thread or in its sessions."""
    process = worker(threads=1)
    result = running.run_sql.enqueue()
    wait_until_begun(eventually)
    Task.objects.cancel()
    wait_for_end(result, eventually)
    others = [tasks.record.enqueue("later", number) for number in range(20)]
    assert {wait_for_end(each, eventually).status for each in others} == {"SUCCESSFUL"}
    assert Attempt.objects.count() == 1
    assert all(thread.is_alive() for thread in process.executor._threads)
