"""Coroutine tasks share one thread for the ORM, and a hundred of them a worker."""

from __future__ import annotations

import pytest
from django.db import connection, connections

from django_pglock import enqueue_many
from django_pglock.models import Task
from django_pglock.worker.child import event_loop, in_flight
from tests.sample import session_tasks as tasks
from tests.sample.models import Effect
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)

SLEEPING = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'SELECT pg_sleep%'"


@pytest.fixture(autouse=True)
def events():
    tasks.HAS_BEGUN.clear()
    tasks.GO_ON.clear()
    yield
    tasks.GO_ON.set()


@pytest.fixture(autouse=True)
def kept_connections(monkeypatch):
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", None)


def is_over():
    return not Task.objects.filter(status__in=("READY", "RUNNING")).exists()


def is_sleeping():
    return execute_sql(SLEEPING)[0][0]


def test_only_the_sql_of_the_timed_out_coroutine_is_cancelled(worker, eventually):
    """Otherwise the statement would block the thread that all coroutines share."""
    worker()
    tasks.sleep_in_server_in_coroutine.enqueue(60)
    eventually(is_sleeping)
    result = tasks.write_in_coroutine.enqueue()  # waits for the thread
    eventually(lambda: Task.objects.filter(pk=result.id, status="SUCCESSFUL").exists(), why="the thread is occupied")
    eventually(is_over)
    assert not is_sleeping()
    assert Effect.objects.count() == 1


def test_the_sql_of_a_cancelled_coroutine_is_cancelled(worker, eventually):
    worker()
    task = tasks.sleep_in_server_in_coroutine.using(timeout=None).enqueue(60)
    eventually(is_sleeping)
    Task.objects.filter(pk=task.id).cancel()
    eventually(is_over)
    eventually(lambda: not is_sleeping())


def test_a_transaction_that_a_coroutine_leaves_open_is_rolled_back(worker, eventually, caplog):
    worker()
    tasks.leave_in_coroutine.enqueue()
    eventually(is_over)
    for _ in range(3):
        tasks.write_in_coroutine.enqueue()
    eventually(is_over)
    assert set(Effect.objects.values_list("name", flat=True)) == {"kept"}
    assert Effect.objects.count() == 3
    assert caplog.text.count("leave_in_coroutine) attempt 1 of 1 has left a transaction open") == 1


def test_a_session_that_can_only_read_is_closed_after_its_error(worker, eventually):
    """Before, each later coroutine failed in this session."""
    worker()
    tasks.forbid_writes_in_coroutine.enqueue("default")
    eventually(is_over)
    tasks.write_in_coroutine.enqueue()
    eventually(is_over)
    assert list(Task.objects.order_by("id").values_list("status", flat=True)) == ["FAILED", "SUCCESSFUL"]


@pytest.fixture
def without_autocommit(change_settings):
    change_settings(AUTOCOMMIT=False)


@pytest.mark.usefixtures("without_autocommit")
def test_without_autocommit_other_coroutines_do_not_commit_writes_of_a_coroutine(worker, eventually, caplog):
    worker()
    tasks.wait_until_told.enqueue()  # or the connection would be closed after a minute
    tasks.write_in_coroutine.enqueue()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 1)
    eventually(lambda: not is_in_transaction(), why="the transaction stays open after the coroutine")
    tasks.call_in_coroutine.enqueue("write_and_commit")
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 2)
    assert list(Effect.objects.values_list("name", flat=True)) == ["committed"]
    assert "has left a transaction open" not in caplog.text, "without AUTOCOMMIT, each SELECT leaves one open"


def is_in_transaction():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in trans%'"
        )
        return cursor.fetchone()[0]


@pytest.mark.usefixtures("without_autocommit")
@pytest.mark.parametrize(("how", "status"), [("close_in_block", "SUCCESSFUL"), ("cut_off", "FAILED")])
def test_without_autocommit_a_session_that_a_coroutine_has_ended_is_replaced(
    worker, eventually, monkeypatch, how, status
):
    """Before, Django opened no session after a close() in atomic(), and each later coroutine failed."""
    monkeypatch.setattr(event_loop, "CHECK_INTERVAL", 1e9)
    worker()
    tasks.call_in_coroutine.enqueue(how)
    eventually(is_over)
    tasks.call_in_coroutine.enqueue("write_and_commit")
    eventually(is_over)
    assert list(Task.objects.order_by("id").values_list("status", flat=True)) == [status, "SUCCESSFUL"]
    assert list(Effect.objects.values_list("name", flat=True)) == ["committed"]


def test_as_many_coroutines_as_may_run_keep_no_sync_task_from_being_claimed(worker, eventually, monkeypatch):
    monkeypatch.setattr(in_flight, "MOST_ASYNC", 4)
    running = worker(threads=1)
    enqueue_many(tasks.wait_until_told, [{}] * 4)
    eventually(lambda: running.in_flight.coroutines.running >= 4)
    result = tasks.write_to.enqueue("default")
    waits = tasks.write_in_coroutine.enqueue()
    eventually(lambda: Task.objects.filter(pk=result.id, status="SUCCESSFUL").exists())
    assert Task.objects.get(pk=waits.id).status == "READY", "no slot is free for one more coroutine"
    tasks.GO_ON.set()
    eventually(is_over)


def test_a_call_that_does_not_end_with_its_coroutine_ends_the_process_in_order(
    worker, eventually, finished, caplog, monkeypatch
):
    """Before, the ORM of all other coroutines waited for it without end."""
    monkeypatch.setattr("django_pglock.worker.child.child.LEAST_GRACE_PERIOD", 0.3)
    process = worker(grace=0.0)
    first = process.child
    late = tasks.occupy.using(timeout=0.1).enqueue()
    assert finished(late).status == "FAILED"
    waiting = tasks.write_in_coroutine.enqueue()
    eventually(lambda: process.child is not first)
    # The process says it after it has asked for its replacement.
    [said] = eventually(lambda: [text for text in caplog.messages if "does not end" in text])
    assert "in pause" in said
    assert finished(waiting).status == "SUCCESSFUL"
