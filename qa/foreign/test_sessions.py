"""Every session that the package opens is opened as Django opens its own.

- ``token``: a backend that puts a fresh password into ``get_connection_params()``; the server knows no other.
- ``minted``: one that puts it in as late as in ``get_new_connection()``.
- ``role``: ``assume_role``. The login may do nothing itself: it has no rights on tables, nor on advisory locks.
- ``pool``: Django's pool of psycopg.
- On each alias a receiver of ``connection_created`` sets ``search_path``, without which no table is found, and marks
  the session's ``application_name``, which the server shows.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import connection, connections, transaction

from django_pglock import Lease, LockNotAvailable, enqueue_many, leader, lock, lock_all, lock_table, task
from django_pglock.models import Task
from django_pglock.testing import hold
from qa.foreign.backends import TOKENS
from qa.foreign.sample.models import Letter
from qa.foreign.sample.tasks import nothing, session_settings
from tests.in_process import InProcessWorker

ALIASES = ["token", "minted", "role", "pool"]
WITH_TOKENS = {"token", "minted"}
OF_CLIENTS = " AND datname = current_database() AND backend_type = 'client backend'"
SESSIONS = f"SELECT usename, application_name FROM pg_stat_activity WHERE pid <> pg_backend_pid(){OF_CLIENTS}"
LOCK_FUNCTIONS = """
SELECT oid::regprocedure FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND proname LIKE '%advisory%lock%'
"""
release = threading.Event()
started = threading.Event()


@task
def wait_for_release() -> None:
    started.set()
    assert release.wait(60)


@task
def tell_user() -> list[str]:
    with connections["role"].cursor() as cursor:
        cursor.execute("SELECT session_user, current_user")
        return [*cursor.fetchone()]


def run(*statements: str) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def rotate() -> None:
    """Change the password of the moment, here and on the server."""
    run(f"ALTER ROLE cloud PASSWORD '{TOKENS.rotate()}'")


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    """Make the roles, and have the server ask one of them for its password. The server is this run's own."""
    run(
        "CREATE ROLE cloud SUPERUSER LOGIN PASSWORD 'first'",
        "CREATE ROLE application",
        "GRANT USAGE ON SCHEMA inside TO application",
        "GRANT ALL ON ALL TABLES IN SCHEMA inside TO application",
        "GRANT ALL ON ALL SEQUENCES IN SCHEMA inside TO application",
        "CREATE ROLE login LOGIN NOINHERIT IN ROLE application",
    )
    with connection.cursor() as cursor:
        cursor.execute(LOCK_FUNCTIONS)
        for (function,) in cursor.fetchall():
            cursor.execute(f"REVOKE EXECUTE ON FUNCTION {function} FROM PUBLIC")
            cursor.execute(f"GRANT EXECUTE ON FUNCTION {function} TO application")
        cursor.execute("SELECT current_setting('hba_file'), pg_read_file(current_setting('hba_file'))")
        path, rules = cursor.fetchone()
        lines = ["local all cloud scram-sha-256", *rules.splitlines()]
        cursor.execute(f"COPY (SELECT unnest(%s::text[])) TO '{path}'", [lines])
        cursor.execute("SELECT pg_reload_conf()")
    with pytest.raises(Exception, match="password"):
        while True:  # until the server has read its file
            refused = connections.create_connection("default")
            refused.settings_dict = {**refused.settings_dict, "USER": "cloud", "PASSWORD": "stale"}
            refused.connect()
            refused.close()


@pytest.fixture(autouse=True)
def only_this_session() -> None:
    """End the sessions of the test before, and change the password: the old one is refused."""
    run("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE pid <> pg_backend_pid()" + OF_CLIENTS)
    rotate()


@pytest.fixture(params=ALIASES)
def using(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    # Django keeps a pool for all threads; its sessions would be the next test's.
    connections[request.param].close()
    if request.param == "pool":
        connections[request.param].close_pool()


@contextmanager
def seen(using: str) -> Iterator[None]:
    """Fail unless sessions are open in the end, each of the alias' user, and prepared by the receiver."""
    yield
    # A session that is just being opened is prepared in a moment. A session opened in another way never is.
    eventually(lambda: all(name.startswith("prepared") for _, name in sessions()), sessions)
    assert {user for user, _ in sessions()} == {connections[using].settings_dict["USER"]}


def sessions() -> list[tuple[str, str]]:
    """Return user and name of each session of this database but for the one that asks."""
    with connection.cursor() as cursor:
        cursor.execute(SESSIONS)
        return cursor.fetchall()


def eventually(function: Callable[[], bool], tell: Callable[[], Any] = str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not function():
        assert time.monotonic() < deadline, f"it did not come true: {tell()}"
        time.sleep(0.05)


def on(using: str, function: Any = nothing) -> Any:
    """Return a task that is enqueued on an alias."""
    return function.using(backend=using)


def test_locks_of_the_session_of_the_thread_work(using):
    with lock("plain", using=using), lock_all("a", "b", using=using):
        with seen(using):
            pass
        with transaction.atomic(using=using), lock("inside", using=using):
            lock_table(Letter, timeout=2, using=using)
    with hold("busy", using=using), pytest.raises(LockNotAvailable) as busy, lock("busy", timeout=0, using=using):
        pass
    assert busy.value.name == "busy"


def test_settings_of_the_session_are_left_as_they_were(using):
    def settings() -> tuple[Any, ...]:
        with connections[using].cursor() as cursor:
            cursor.execute(
                "SELECT current_setting('TimeZone'), current_setting('statement_timeout'), "
                "current_setting('search_path'), current_setting('app.tenant'), current_setting('lock_timeout')"
            )
            return cursor.fetchone()

    before = settings()
    assert before == ("Asia/Tokyo", "77s", "inside", "fourth", "0")
    with lock("plain", timeout=5, max_hold=30, using=using):
        pass
    with transaction.atomic(using=using), lock("inside", timeout=5, using=using):
        on(using).enqueue()
        enqueue_many(on(using), [{"number": 1}])
    assert settings() == before


def test_locks_of_coroutines_open_sessions_as_django_does(using):
    def look() -> None:
        with seen(using):
            pass
        connection.close()

    async def work() -> None:
        async with lock("asynchronous", using=using):
            await asyncio.to_thread(look)
        async with lock_all("a", "b", timeout=1, using=using):
            pass

    connection.close()
    asyncio.run(work())


def test_leases_open_sessions_as_django_does(using):
    with Lease("nightly", ttl=60, using=using) as lease, seen(using):
        lease.extend(60)
        lease.assert_held()
    rotate()
    with leader("first", ttl=60, using=using) as leadership, seen(using):
        leadership.assert_held()


def test_a_worker_opens_all_its_sessions_as_django_does(using, drain):
    release.clear()
    started.clear()
    on(using, wait_for_release).enqueue()
    connections[using].close()
    worker = InProcessWorker(using=using, threads=2, grace=5)
    worker.start()
    try:
        assert started.wait(60)
        with seen(using):
            pass
        rotate()
        result = on(using).enqueue()
        release.set()
        assert result.wait(60)
    finally:
        release.set()
        worker.shutdown()
    assert {*Task.objects.using(using).values_list("status", flat=True)} == {"SUCCESSFUL"}


def test_a_wait_for_a_result_opens_a_session_as_django_does(using):
    release.clear()
    started.clear()
    result = on(using, wait_for_release).enqueue()
    worker = InProcessWorker(using=using, threads=1, grace=5)
    worker.start()
    try:
        assert started.wait(60)
        before = len(sessions())
        waiter = threading.Thread(target=result.wait, args=(30,))
        waiter.start()
        eventually(lambda: len(sessions()) > before, sessions)
        with seen(using):
            pass
        release.set()
        waiter.join(60)
        assert not waiter.is_alive()
        assert result.status == "SUCCESSFUL"
    finally:
        release.set()
        worker.shutdown()


def test_functions_find_the_sessions_that_they_would_find_in_a_request(using, drain):
    result = on(using, session_settings).enqueue("TimeZone", "search_path")
    identity = on(using, tell_user).enqueue()
    drain(using=using)
    result.refresh()
    identity.refresh()
    # The functions use the default alias and another one. A worker opens both as a request does.
    assert result.return_value == ["Asia/Tokyo", "inside"]
    assert identity.return_value == ["login", "application"]


def test_each_session_asks_for_its_password():
    for using in sorted(WITH_TOKENS):
        rotate()
        before = TOKENS.asked
        for number in range(3):
            with Lease("asking", number, ttl=60, using=using):
                pass
        assert TOKENS.asked - before >= 3
