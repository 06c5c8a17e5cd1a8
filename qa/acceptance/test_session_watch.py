"""Half-open connections of task threads, at each point at which a thread waits for an answer."""

from __future__ import annotations

import pytest
from django.db import connection, connections

from django_pglock.models import Attempt, Task
from django_pglock.postgres.connections import has_statement_in_progress
from django_pglock.worker.liveness import session_watch
from django_pglock.worker.child import task_thread
from django_pglock.worker.service import ConnectedService
from tests.conftest import NEVER
from tests.proxy import Proxy
from tests.sample import session_tasks as tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


@pytest.fixture(autouse=True)
def events():
    tasks.HAS_BEGUN.clear()
    tasks.GO_ON.clear()
    yield
    tasks.GO_ON.set()


@pytest.fixture
def proxy(transactional_db, monkeypatch):
    """A network between the server and all connections but the tests' own, which is open by now."""
    with Proxy.before(connection) as proxy:
        for name, value in {"HOST": "127.0.0.1", "PORT": str(proxy.port), "CONN_MAX_AGE": None}.items():
            monkeypatch.setitem(connections.settings["default"], name, value)
        yield proxy


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(ConnectedService, "statement_timeout", 1.0)
    monkeypatch.setattr(session_watch, "CHECK_INTERVAL", 0.1)
    monkeypatch.setattr(session_watch, "LEFT_TO_SERVER", 0.5)
    monkeypatch.setattr(session_watch, "CHECK_INTERVAL", 0.1)
    monkeypatch.setattr(session_watch, "LONGEST_TRANSIT", 0.5)


def is_done():
    return not Task.objects.exclude(status="SUCCESSFUL").exists()


def begin(function):
    """Enqueue a task and wait until it pauses."""
    tasks.HAS_BEGUN.clear()
    tasks.GO_ON.clear()
    function.enqueue()
    assert tasks.HAS_BEGUN.wait(NEVER)


@pytest.fixture
def member(proxy, quick, worker, eventually):
    """A worker with one thread, which has its session."""
    member = worker(threads=1)
    tasks.write.enqueue()
    eventually(is_done)
    return member


def test_a_statement_on_a_half_open_connection_ends_with_an_error(member, proxy, eventually, caplog):
    begin(tasks.ask_twice)
    proxy.black_hole(new=False)
    tasks.GO_ON.set()
    eventually(is_done, why="the thread hangs")
    assert [row.exception_path for row in Attempt.objects.all()] == ["django.db.utils.OperationalError"]
    assert "Thread lockworker-thread-1, which runs task " in caplog.text
    assert "the session is idle at the server" in caplog.text


def test_the_commit_of_an_atomic_task_on_a_half_open_connection_ends(member, proxy, eventually, caplog):
    begin(tasks.write_and_pause)
    proxy.black_hole(new=False)
    tasks.GO_ON.set()
    eventually(is_done, why="the thread hangs")
    assert Effect.objects.count() == 2, "the effects of each task are there once"
    assert "The connection is closed" in caplog.text


@pytest.mark.parametrize("has_health_checks", [False, True])
def test_a_begin_and_a_health_check_on_a_half_open_connection_end(
    proxy, quick, worker, eventually, caplog, monkeypatch, has_health_checks
):
    monkeypatch.setitem(connections.settings["default"], "CONN_HEALTH_CHECKS", has_health_checks)
    worker(threads=1)
    tasks.write.enqueue()
    eventually(is_done)
    proxy.black_hole(new=False)
    tasks.write.enqueue()
    eventually(lambda: "The connection is closed" in caplog.text, why="the thread hangs")
    eventually(is_done)
    assert Effect.objects.count() == 2


def test_the_connection_check_of_a_pool_on_a_half_open_connection_ends(
    proxy, quick, worker, eventually, caplog, monkeypatch
):
    """The pool checks a connection that belongs to no Django connection yet."""
    settings = connections.settings["default"]
    monkeypatch.setitem(settings, "CONN_MAX_AGE", 0)
    monkeypatch.setitem(settings, "CONN_HEALTH_CHECKS", True)
    monkeypatch.setitem(settings, "OPTIONS", {**settings["OPTIONS"], "pool": {"min_size": 1, "max_size": 2}})
    try:
        worker(threads=1)
        tasks.write.enqueue()
        eventually(is_done)
        proxy.black_hole(new=False)
        tasks.write.enqueue()
        eventually(lambda: "The connection is closed" in caplog.text, why="the thread hangs")
        eventually(is_done)
    finally:
        connections["default"].close_pool()


def test_an_unreachable_server_ends_the_wait_of_a_thread(member, proxy, eventually, caplog, monkeypatch):
    monkeypatch.setattr(session_watch, "QUESTION_TIMEOUT", 2.0)
    begin(tasks.ask_twice)
    proxy.black_hole()
    tasks.GO_ON.set()
    eventually(lambda: "the server cannot be reached" in caplog.text, why="the thread hangs")
    proxy.pass_through()
    eventually(is_done)


def test_a_timeout_ends_the_wait_where_the_server_has_nothing_to_cancel(member, proxy, eventually, caplog, monkeypatch):
    monkeypatch.setattr(session_watch, "CHECKS_BEFORE_FIRST_QUESTION", 10**9)
    monkeypatch.setattr(task_thread, "CANCEL_GRACE_PERIOD", 1.0)
    # The request goes to the server, which has nothing to cancel. (The proxy would answer it with a reset.)
    monkeypatch.setattr(task_thread, "cancel_statement", has_statement_in_progress)
    begin(tasks.ask_twice_in_time)
    proxy.black_hole(new=False)
    tasks.GO_ON.set()
    eventually(is_done, why="the thread hangs")
    assert [row.exception_path for row in Attempt.objects.all()] == ["django_pglock.errors.TaskTimeout"]
    assert "does not end although the server was asked to cancel it" in caplog.text


def test_a_timeout_ends_the_wait_where_the_cancel_does_not_arrive(member, proxy, eventually, caplog, monkeypatch):
    monkeypatch.setattr(session_watch, "CHECKS_BEFORE_FIRST_QUESTION", 10**9)
    begin(tasks.ask_twice_in_time)
    proxy.black_hole(new=False)
    tasks.GO_ON.set()
    eventually(is_done, why="the thread hangs")
    assert "could not be cancelled" in caplog.text


def test_a_long_statement_is_not_ended_and_logged_once(proxy, quick, worker, eventually, caplog, monkeypatch):
    monkeypatch.setattr(session_watch, "CHECKS_BEFORE_REPORT", 15)
    member = worker(threads=1)
    tasks.sleep_in_server.enqueue(8)
    eventually(is_done)
    assert Task.objects.get().attempts == 1
    assert caplog.text.count("The thread continues to wait") == 1
    assert "the server reports the state active for the session" in caplog.text
    eventually(lambda: not member.session_watch._sessions, why="its own session stays open")


def test_the_watch_itself_does_not_hang(member, proxy, eventually):
    """The session of the watch becomes half open while the watch queries a long statement."""
    tasks.sleep_in_server.enqueue(10)
    eventually(lambda: member.session_watch._sessions)
    proxy.black_hole(new=False)
    failed = eventually(lambda: Task.objects.filter(status="FAILED").first(), why="the watch hangs")
    assert (failed.finished_at - failed.started_at).total_seconds() >= 10, "the statement was under way at the server"


def test_the_watch_ignores_slow_reads_and_frequent_queries(member, eventually, caplog):
    tasks.read_slowly.enqueue(1.5)
    tasks.ask_often.enqueue(1.5)
    eventually(is_done)
    assert {task.attempts_made for task in Task.objects.all()} == {1}
    assert "has had no answer" not in caplog.text
