"""A task never gets a connection in the state in which an earlier task of the thread has left it."""

from __future__ import annotations

import time

import pytest
from django.db import OperationalError, connection, connections

from django_pglock import enqueue_many, lock
from django_pglock.models import Task
from django_pglock.worker.child import event_loop, executor, task_connections
from tests.sample import session_tasks as tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def kept_connections(monkeypatch):
    """Persistent connections of threads, which are checked only after each task."""
    monkeypatch.setattr(executor, "CHECK_INTERVAL", 1e9)
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", None)


def is_over():
    return not Task.objects.filter(status__in=("READY", "RUNNING")).exists()


@pytest.mark.parametrize("what", [what for what in tasks.LEAVE if "another" not in what])
def test_a_task_gets_no_open_transaction_of_the_task_before_it(worker, eventually, caplog, what):
    """After a BEGIN without Django, later tasks succeeded, and their writes were lost without an error."""
    worker(threads=1)
    tasks.write_to.enqueue("default")
    tasks.leave.enqueue(what)
    tasks.write_to.enqueue("default")
    eventually(is_over)
    assert set(Task.objects.values_list("status", flat=True)) == {"SUCCESSFUL"}
    assert Effect.objects.count() == 2
    assert ("has left a transaction open" in caplog.text) == (what != "a closed connection")


@pytest.mark.parametrize(
    ("lose", "use"),
    [
        (tasks.lose_session_at_the_end, tasks.read),
        (tasks.lose_session_at_the_end, tasks.write),
        (tasks.close_descriptor_at_the_end, tasks.read),
        (tasks.lose_session_of_coroutines_at_the_end, tasks.read_in_coroutine),
    ],
    ids=["plain", "atomic", "descriptor", "coroutine"],
)
def test_a_session_that_an_earlier_task_has_lost_is_not_the_next_ones_failure(
    worker, eventually, monkeypatch, lose, use
):
    """Its first statement has another session, although the last check was before the loss."""
    monkeypatch.setattr(event_loop, "CHECK_INTERVAL", 1e9)
    worker(threads=1)
    use.enqueue()
    eventually(is_over)
    enqueue_many(lose, [()])
    eventually(is_over)
    use.enqueue()
    eventually(is_over)
    assert list(Task.objects.order_by("id").values_list("status", "attempts")) == [("SUCCESSFUL", 1)] * 3


@pytest.mark.parametrize(("least", "sessions"), [(1e9, 1), (0.0, 3)])
def test_a_busy_thread_keeps_its_connection_for_a_while_whatever_conn_max_age_is(
    worker, eventually, monkeypatch, least, sessions
):
    """With Django's default, 0, a thread opened a new session for every second task of 50 ms."""
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", 0)
    monkeypatch.setattr(executor, "CHECK_INTERVAL", -1.0)
    monkeypatch.setattr(task_connections, "LEAST_AGE", least)
    worker(threads=1)
    enqueue_many(tasks.tell_backend, [()] * 3)
    eventually(is_over)
    assert len(set(Task.objects.values_list("result", flat=True))) == sessions


def sessions_of_threads():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name = ''"
        )
        return cursor.fetchone()[0]


def test_the_thread_of_the_orm_closes_its_connection_when_no_coroutine_runs(worker, eventually, monkeypatch):
    monkeypatch.setattr(event_loop, "IDLE_TIMEOUT", 0.3)
    worker(threads=1)
    tasks.GO_ON.clear()
    tasks.wait_until_told.enqueue()
    tasks.tell_backend_in_coroutine.enqueue()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 1)
    time.sleep(1.0)
    assert sessions_of_threads() >= 1, "a coroutine runs, which may use it"
    tasks.GO_ON.set()
    eventually(is_over)
    eventually(lambda: sessions_of_threads() == 0, why="it stays open")
    tasks.tell_backend_in_coroutine.enqueue()
    eventually(is_over)
    eventually(lambda: sessions_of_threads() == 0, why="the next one stays open")


def test_a_thread_without_tasks_closes_its_connection(worker, eventually, monkeypatch):
    monkeypatch.setattr(task_connections, "IDLE_TIMEOUT", 0.1)
    worker(threads=1)
    for _ in range(2):
        tasks.tell_backend.enqueue()
        eventually(is_over)
        eventually(lambda: sessions_of_threads() == 0, why="it stays open")
    first, second = Task.objects.values_list("result", flat=True)
    assert first != second


def test_no_task_meets_a_connection_that_is_being_closed(worker, eventually, monkeypatch):
    """A thread closes its connection while it has no task. A task may come at this moment."""
    monkeypatch.setattr(task_connections, "IDLE_TIMEOUT", 0.0)
    worker(threads=3)
    for _ in range(60):
        tasks.tell_backend.enqueue()
    eventually(is_over)
    assert set(Task.objects.values_list("status", "attempts")) == {("SUCCESSFUL", 1)}


def test_a_connection_that_holds_a_lock_stays_open(in_threads):
    """A task may keep a session lock after its end, for the next task of its thread."""

    def hold(_):
        own = connections["default"]
        held = lock("kept by a thread", scope="session").acquire()
        task_connections.close_idle_connections()
        assert own.connection is not None
        held.release()
        task_connections.close_idle_connections()
        assert own.connection is None

    in_threads(hold, 1)


@pytest.mark.parametrize(
    ("codes", "is_others"),
    [(["08P01"], True), (["08P01", "25P03"], False), (["57P03"], True), (["57P01"], False), ([], False)],
)
def test_an_error_of_a_pooler_does_not_hide_that_the_task_has_exceeded_a_limit(codes, is_others, monkeypatch):
    """Otherwise the task would never count, and run again without end."""
    monkeypatch.setattr(task_connections, "sqlstates_of", lambda error: iter(codes))
    assert task_connections.was_ended_by_others(object(), OperationalError()) is is_others
