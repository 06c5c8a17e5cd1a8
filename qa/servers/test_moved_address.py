"""An address that leads to a standby for some seconds, as while it moves in a failover."""

from __future__ import annotations

import time

import pytest
from django.db import DatabaseError, connections

from example_project.postgres import PrivatePostgres
from tests.conftest import EMPTY, NEVER, WorkerProcess, ask, make_tables
from tests.pgbouncer import PROGRAM, PgBouncer
from tests.proxy import Proxy
from tests.sample import session_tasks

pytestmark = pytest.mark.acceptance

ENQUEUE = """
INSERT INTO django_pglock_task (queue, backend, task_path, args)
SELECT 'default', 'default', 'tests.sample.session_tasks.' || name, '[8]' FROM unnest(%s::text[]) AS name
"""
READ_ONLY = "SELECT 1 FROM django_pglock_attempt WHERE outcome = %s AND traceback LIKE '%%ReadOnlySqlTransaction%%'"
SESSIONS = "SELECT 1 FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
STATUSES = "SELECT status, count(*) FROM django_pglock_task GROUP BY status"
TASKS = ["write_late_in_coroutine"] * 3 + ["write_late"] * 3


@pytest.fixture(scope="module")
def servers():
    with PrivatePostgres() as primary:
        make_tables(primary)
        with PrivatePostgres(standby_of=primary) as standby:
            yield primary, standby


def test_no_session_stays_connected_to_a_standby_after_the_address_moves_back(servers, eventually):
    """Neither a service nor a thread stays there. A task whose session was read-only has not failed."""
    primary, standby = servers
    with Proxy(str(primary.folder)) as proxy:
        process = WorkerProcess("--threads", "3", url=proxy.url("postgres"))
        try:
            process.wait_for("is ready")
            ask(primary, ENQUEUE, TASKS)
            eventually(lambda: ask(primary, STATUSES) == [("RUNNING", 6)], why=process.output)
            proxy.lead_to(str(standby.folder))
            eventually(lambda: ask(standby, SESSIONS), why=f"nobody came to the standby: {process.output}")
            time.sleep(10)
            proxy.host = str(primary.folder)  # what is open stays where it is
            eventually(lambda: not ask(standby, SESSIONS), why="somebody stays at the standby")
            # They are scheduled, so upkeep works again.
            eventually(lambda: ask(primary, STATUSES) == [("SUCCESSFUL", 6)], why=process.output)
            assert len(ask(primary, READ_ONLY, "LOST")) >= 3, "not each thread has met the standby"
            assert not ask(primary, READ_ONLY, "FAILED"), process.output
        finally:
            process.end()


# A worker in this process, on an alias "moved" that leads through a proxy

ADD = """
INSERT INTO django_pglock_task (queue, backend, task_path, args, meta)
VALUES ('default', 'default', 'tests.sample.session_tasks.' || %s, jsonb_build_array(%s::text), %s)
"""
OUTCOMES = "SELECT outcome, exception_path FROM django_pglock_attempt ORDER BY id"
NAMES = "SELECT name FROM sample_effect"
needs_pgbouncer = pytest.mark.skipif(PROGRAM is None, reason="no PgBouncer on this machine: apt-get install pgbouncer")


@pytest.fixture
def primary(servers):
    yield servers[0]
    ask(servers[0], EMPTY)


@pytest.fixture
def standby(servers):
    return servers[1]


@pytest.fixture
def proxy(primary):
    session_tasks.HAS_BEGUN.clear()
    session_tasks.GO_ON.clear()
    with Proxy(str(primary.folder)) as proxy:
        yield proxy
    session_tasks.GO_ON.set()


@pytest.fixture
def pgbouncer(proxy, request):
    way = f"host=127.0.0.1 port={proxy.port} user=postgres dbname=postgres pool_size=10"
    with PgBouncer({"postgres": way}, mode=getattr(request, "param", "transaction")) as pgbouncer:
        yield pgbouncer


@pytest.fixture
def moved(task_alias, proxy):
    """Make an alias that leads through the proxy, in sessions that threads keep."""

    def make(name="moved", **settings):
        ways = {"HOST": "127.0.0.1", "PORT": str(proxy.port), "NAME": "postgres", "USER": "postgres", "PASSWORD": ""}
        return task_alias(name, **{**ways, "CONN_MAX_AGE": None, **settings})

    return make


def add(primary, name, argument, options="{}"):
    ask(primary, ADD, name, argument, options)


def is_over(primary):
    return not ask(primary, "SELECT 1 FROM django_pglock_task WHERE status IN ('READY', 'RUNNING', 'SCHEDULED')")


def is_idle(running):
    return not (running.in_flight.threads.running or running.in_flight.coroutines.running)


def is_in_recovery():
    try:
        with connections["moved"].cursor() as cursor:
            cursor.execute("SELECT pg_is_in_recovery()")
            return cursor.fetchone()[0]
    except DatabaseError:
        return None
    finally:
        connections["moved"].close()


def write_at_the_standby(servers, proxy, running, eventually):
    """Let the function that pauses write while the address leads to the standby."""
    assert session_tasks.HAS_BEGUN.wait(NEVER)
    proxy.lead_to(str(servers[1].folder))
    eventually(is_in_recovery, why="a pooler keeps its sessions to the primary")
    session_tasks.GO_ON.set()
    eventually(lambda: is_idle(running), why="the function does not end")


@needs_pgbouncer
@pytest.mark.parametrize(
    ("pgbouncer", "name", "options"),
    [
        ("session", "write_after_pause", "{}"),
        ("transaction", "write_after_pause", "{}"),
        ("transaction", "write_after_pause", '{"options": {"atomic": true}}'),
        ("transaction", "write_after_pause_in_coroutine", "{}"),
    ],
    indirect=["pgbouncer"],
    ids=["session", "transaction", "atomic", "coroutine"],
)
def test_a_standby_behind_a_pooler_is_no_failure_of_a_task(
    servers, primary, proxy, pgbouncer, moved, worker, eventually, name, options
):
    """A pooler repeats the report of the first server, so the server must be queried."""
    running = worker(using=moved(HOST=str(pgbouncer.folder), PORT=""), threads=1)
    add(primary, name, "moved", options)
    write_at_the_standby(servers, proxy, running, eventually)
    proxy.lead_to(str(primary.folder))
    eventually(lambda: is_over(primary))
    assert ask(primary, OUTCOMES) == [("LOST", "django.db.utils.InternalError")]
    assert ask(primary, NAMES) == [("late",)]


@needs_pgbouncer
def test_a_pooler_that_reports_a_standby_of_the_past_changes_nothing(
    primary, standby, proxy, pgbouncer, moved, worker, eventually
):
    """Before, a task without write rights was repeated forever, and each thread opened ten sessions a second."""
    proxy.lead_to(str(standby.folder))
    using = moved(HOST=str(pgbouncer.folder), PORT="")
    assert is_in_recovery()
    proxy.lead_to(str(primary.folder))
    eventually(lambda: is_in_recovery() is False)
    worker(using=using, threads=1)
    add(primary, "write_read_only", "moved")
    eventually(lambda: is_over(primary))
    assert ask(primary, OUTCOMES) == [("FAILED", "django.db.utils.InternalError")]
    for _ in range(2):
        time.sleep(0.3)
        add(primary, "tell_backend_of", "moved")
        eventually(lambda: is_over(primary))
    first, second = ask(primary, "SELECT result FROM django_pglock_task WHERE status = 'SUCCESSFUL'")
    assert first == second, "the thread has opened another session"


def test_the_pool_of_django_keeps_no_session_to_a_standby(servers, primary, proxy, moved, worker, eventually):
    """Before, the pool gave this session to the next attempt, which failed at the standby as well."""
    pool = {"min_size": 1, "max_size": 1, "timeout": 30}
    running = worker(using=moved(CONN_MAX_AGE=0, OPTIONS={"pool": pool}), threads=1)
    try:
        add(primary, "write_after_pause", "moved")
        write_at_the_standby(servers, proxy, running, eventually)
        proxy.host = str(primary.folder)  # what is open stays where it is
        eventually(lambda: is_over(primary))
        assert ("LOST", "django.db.utils.InternalError") in ask(primary, OUTCOMES)
        assert ask(primary, NAMES) == [("late",)]
    finally:
        running.shutdown()
        connections["moved"].close_pool()


@pytest.mark.parametrize("name", ["write_to", "write_to_in_coroutine"])
def test_a_session_of_a_second_alias_does_not_stay_at_a_standby(
    primary, standby, proxy, moved, worker, eventually, name
):
    """Before, each later task failed in the thread that all coroutines share."""
    moved("second")
    worker(using=moved("direct", HOST=str(primary.folder), PORT=""), threads=1)
    add(primary, name, "second")
    eventually(lambda: is_over(primary))
    assert ask(primary, NAMES) == [("kept",)]
    proxy.lead_to(str(standby.folder))

    def meets_the_standby():
        add(primary, name, "second")
        eventually(lambda: is_over(primary))
        return ("FAILED", "django.db.utils.InternalError") in ask(primary, OUTCOMES)

    # The first may still meet the end of the session to the primary.
    eventually(meets_the_standby)
    failures = len(ask(primary, OUTCOMES))
    proxy.host = str(primary.folder)  # what is open stays where it is
    add(primary, name, "second")
    eventually(lambda: is_over(primary))
    assert len(ask(primary, OUTCOMES)) == failures, "the session stays at the standby"
    assert len(ask(primary, NAMES)) == 2
