"""Half-open connections, networks that fail for a while, and timeouts of the role that are not for workers."""

from __future__ import annotations

import time

import pytest
from django.db import connection, connections

from django_pglock import Lease, LockError, leader
from django_pglock.locks import lease_thread
from django_pglock.models import Attempt, Task
from django_pglock.postgres.connections import has_statement_in_progress
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.worker import service
from django_pglock.worker.child import runners
from django_pglock.worker.service import Service
from qa.processes import sessions
from tests.conftest import NEVER
from tests.proxy import Proxy
from tests.sample import running_tasks, session_tasks, tasks

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


#: What an idle worker has a session for.
KINDS = {"lockworker heartbeat", "lockworker feeder"}


def kinds():
    return {name for name, _ in sessions()}


@pytest.fixture
def proxy(transactional_db, monkeypatch):
    """A network between the server and all connections but the tests' own, which is open by now."""
    with Proxy.before(connection) as proxy:
        for name, value in (("HOST", "127.0.0.1"), ("PORT", str(proxy.port))):
            monkeypatch.setitem(connections.settings["default"], name, value)
        yield proxy


@pytest.fixture
def short_timeouts(monkeypatch):
    monkeypatch.setattr(Service, "statement_timeout", 1.0)
    monkeypatch.setattr(service, "LATE_ANSWER", 0.5)


def done():
    return not Task.objects.exclude(status="SUCCESSFUL").exists()


def test_services_close_connections_on_which_the_server_does_not_answer(
    proxy, short_timeouts, worker, eventually, caplog
):
    """The old connections are silent. The kernel of the proxy acknowledges data, so TCP notices nothing."""
    worker()
    tasks.nothing.enqueue()
    eventually(done)
    eventually(lambda: kinds() >= KINDS)
    proxy.black_hole(new=False)
    tasks.nothing.enqueue()
    eventually(done, why="the worker hangs")
    for name in ("heartbeat", "feeder"):
        eventually(lambda name=name: f"The {name} works again" in caplog.text, why=f"the {name} hangs")
    assert Task.objects.filter(attempts__gt=2).count() == 0
    proxy.pass_through()


def test_a_worker_overrides_the_timeouts_that_are_set_for_its_role(worker_process, eventually):
    """All that end sessions and statements; set for the role, as administrators do.

    They hold for the task's own transaction, which a slow machine must not reach.
    """
    with connection.cursor() as cursor:
        names = ["statement_timeout", *db_limits(cursor)]
        try:
            for name in names:
                cursor.execute(f"ALTER ROLE CURRENT_USER IN DATABASE {database()} SET {name} = '3s'")
            process = worker_process("--threads", "1")
            eventually(lambda: kinds() >= KINDS)
            before = set(sessions())
            tasks.record_atomically.enqueue("before")
            eventually(done, why=process.output)
            time.sleep(6)
            assert {name for name, _ in before.intersection(sessions())} >= KINDS, process.output
            tasks.record_atomically.enqueue("after")  # the thread's own session has been ended meanwhile
            eventually(done, why=process.output)
            assert set(Task.objects.values_list("attempts", flat=True)) == {1}
            assert "has lost its database connection" not in process.output
        finally:
            for name in names:
                cursor.execute(f"ALTER ROLE CURRENT_USER IN DATABASE {database()} RESET {name}")


def db_limits(cursor):
    cursor.execute("SELECT name FROM pg_settings WHERE name ~ '(session|^transaction)_timeout$'")
    return [name for (name,) in cursor.fetchall()]


def database():
    return connection.ops.quote_name(connection.settings_dict["NAME"])


def test_no_connection_waits_for_a_silent_network_for_ever(monkeypatch):
    options = {"connect_timeout": 99, **connection.settings_dict["OPTIONS"]}
    monkeypatch.setitem(connections.settings["default"], "OPTIONS", dict(options))
    private = dedicated_connection("default")
    try:
        private.ensure_connection()
        parameters = private.connection.info.get_parameters()
        assert (parameters["connect_timeout"], parameters["tcp_user_timeout"]) == ("99", "15000")
        assert parameters["keepalives_idle"] == "10"
    finally:
        private.close()
    assert connections.settings["default"]["OPTIONS"] == options, "DATABASES is the project's"


def test_a_coroutine_does_not_meet_a_connection_that_died_while_idle(worker, eventually):
    worker()
    running_tasks.count_in_coroutine.enqueue(closes=False)
    eventually(done)
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name = ''"
        )
        assert cursor.rowcount == 1
    # A connection on which an answer has just arrived is not checked again.
    time.sleep(0.2)
    running_tasks.count_in_coroutine.enqueue(closes=True)
    eventually(lambda: not Task.objects.filter(status__in=("READY", "RUNNING")).exists())
    assert done(), "the second one met the dead connection"


# Leases on a half-open connection: a proxy acknowledges all data, and no answer comes.


@pytest.fixture
def new_lease_thread(proxy, monkeypatch):
    """A thread keeps its settings, so a lease thread that exists already would not connect through the proxy."""
    monkeypatch.setattr(lease_thread, "_lease_thread", None)
    yield
    connection.close()


def test_a_lease_is_renewed_on_another_connection(proxy, new_lease_thread, eventually):
    """One renewal gets no answer, the next one opens a new session."""
    with Lease("half open", ttl=12) as lease:
        proxy.black_hole(new=False)
        # The session of this thread is half open, too.
        first = lease._holder._deadline
        eventually(lambda: lease._holder._deadline > first)
        lease.assert_held()


def test_a_leader_steps_down_at_the_first_renewal_without_an_answer(proxy, new_lease_thread):
    """If the leader stepped down only when the lease expires, the reason would contain "six seconds"."""
    with pytest.raises(LockError, match=r"could not be renewed \("), leader("half open", ttl=6) as leadership:
        proxy.black_hole(new=False)
        assert leadership.lost.wait(NEVER)
        leadership.assert_held()


def test_releasing_a_lease_on_a_half_open_connection_ends(proxy, new_lease_thread, monkeypatch):
    monkeypatch.setattr(lease_thread.LeaseHolder._execute, "__kwdefaults__", {"within": 1.0})
    began = time.monotonic()
    with Lease("half open", ttl=60):
        proxy.black_hole(new=False)
    assert time.monotonic() - began < NEVER
    with Lease("half open", ttl=60):
        pass


# Half-open connections of task threads: a timeout ends the wait for an answer that does not come.


@pytest.fixture
def begin(proxy, worker, eventually, monkeypatch):
    """Start a worker with one thread, which has its session, and a task in it that pauses."""
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", None)
    session_tasks.GO_ON.set()
    worker(threads=1)
    session_tasks.write.enqueue()
    eventually(done)
    session_tasks.HAS_BEGUN.clear()
    session_tasks.GO_ON.clear()
    session_tasks.ask_twice_in_time.enqueue()
    assert session_tasks.HAS_BEGUN.wait(NEVER)
    yield
    session_tasks.GO_ON.set()


def test_a_timeout_ends_the_wait_where_the_server_has_nothing_to_cancel(begin, proxy, eventually, caplog, monkeypatch):
    monkeypatch.setattr(runners, "CANCEL_GRACE_PERIOD", 1.0)
    # The request goes to the server, which has nothing to cancel. (The proxy would answer it with a reset.)
    monkeypatch.setattr(runners, "cancel_statement", has_statement_in_progress)
    proxy.black_hole(new=False)
    session_tasks.GO_ON.set()
    eventually(done, why="the thread hangs")
    assert [row.exception_path for row in Attempt.objects.all()] == ["django_pglock.errors.TaskTimeout"]
    assert "does not end although the server was asked to cancel it" in caplog.text


def test_a_timeout_ends_the_wait_where_the_cancel_does_not_arrive(begin, proxy, eventually, caplog, monkeypatch):
    proxy.black_hole(new=False)
    session_tasks.GO_ON.set()
    eventually(done, why="the thread hangs")
    assert "could not be cancelled" in caplog.text
