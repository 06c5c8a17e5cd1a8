"""PgBouncer in transaction mode: which locks exclude there, which do not, and that the check says so."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import nullcontext

import pytest
from django.core.checks import run_checks
from django.db import connection, connections, transaction
from django.db.models.functions import Now

from django_pglock import Lease, LockLost, LockNotAvailable, leader, lock, semaphore, try_lock
from django_pglock.management.selftest import selftest
from django_pglock.models import AdvisoryLock, Attempt, Task, Waiter
from django_pglock.models import Lease as LeaseRow
from django_pglock.models import Worker as WorkerRow
from django_pglock.postgres.connections import has_session_ended
from django_pglock.store.await_end import await_end
from django_pglock.testing import assert_no_locks
from tests.conftest import NEVER, ROOT
from tests.docs.test_docs import blocks
from tests.pgbouncer import PROGRAM, PgBouncer, way_to_server
from tests.sample import session_tasks, tasks

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.skipif(PROGRAM is None, reason="no PgBouncer on this machine: apt-get install pgbouncer"),
]


@pytest.fixture
def pgbouncer(alias, eventually):
    """Run PgBouncer before the tests' database, through a pool of one session and one of two."""
    connection.ensure_connection()
    way = way_to_server(connection.connection.info)
    with PgBouncer({"one": f"{way} pool_size=1", "two": f"{way} pool_size=2"}) as pgbouncer:
        yield {"HOST": str(pgbouncer.folder), "PORT": ""}
    eventually(lambda: locks_held() == 0, why="sessions of PgBouncer are left with their locks")


def locks_held():
    return AdvisoryLock.objects.using("default").count()


@pytest.mark.parametrize("timeout", [None, 30])
def test_transaction_locks_exclude_and_leave_nothing_behind(pgbouncer, alias, in_threads, timeout):
    """Two clients take each of 200 keys at the same moment, over two sessions that all clients share."""
    alias("pooled", NAME="two", **pgbouncer)
    together, visits, inside, meet = [], [], set(), threading.Barrier(2)

    def visit(client, number):
        with lock("key", number, scope="transaction", using="pooled", timeout=timeout):
            together.extend(inside)
            inside.add(client)
            with connections["pooled"].cursor() as cursor:
                cursor.execute("SELECT 1")  # long enough for the other one to get the lock
            inside.discard(client)
            visits.append(number)

    def visit_all(client):
        try:
            for number in range(200):
                meet.wait(NEVER)
                visit(client, number)
        except BaseException:
            meet.abort()  # or the other one would wait for us
            raise

    in_threads(visit_all, 2)
    assert (together, len(visits)) == ([], 400)
    assert_no_locks()


def test_a_busy_transaction_lock_is_refused_and_leaves_nothing_behind(pgbouncer, alias):
    for name in ("first", "second"):
        alias(name, NAME="two", **pgbouncer)
    for timeout in (0, 0.02):
        busy = lock("a", scope="transaction", using="second", timeout=timeout)
        with lock("a", scope="transaction", using="first"), pytest.raises(LockNotAvailable), busy:
            pass
    assert_no_locks()


def test_two_clients_may_both_get_a_session_lock(pgbouncer, alias):
    """The danger: both clients get the same session, and PostgreSQL grants a session its own lock again."""
    for name in ("first", "second"):
        alias(name, NAME="one", **pgbouncer)
    with lock("a", scope="session", using="first"), try_lock("a", scope="session", using="second") as held:
        assert held


def test_a_session_lock_may_stay_behind_for_ever(pgbouncer, alias):
    """The danger: the lock is released in another session than it was taken in. The package reports that."""
    for name in ("first", "second"):
        alias(name, NAME="two", **pgbouncer)
    handle = lock("a", scope="session", using="first").acquire()
    with transaction.atomic(using="second"):
        with connections["second"].cursor() as cursor:
            cursor.execute("SELECT 1")  # in the only session that there is yet, the one with the lock
        with pytest.raises(LockLost):
            handle.release()
    assert locks_held() == 1


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_a_holder_that_stalls_behind_it_gets_the_error_of_a_lost_lock(alias, eventually, mode):
    """PgBouncer adds an error of its own, so that psycopg finds two answers to one COMMIT."""
    connection.ensure_connection()
    with PgBouncer({"stalls": f"{way_to_server(connection.connection.info)} pool_size=5"}, mode=mode) as pgbouncer:
        name = alias(f"stalls_{mode}", NAME="stalls", HOST=str(pgbouncer.folder), PORT="")
        for scope, block in (("transaction", nullcontext()), ("transaction", transaction.atomic(using=name))):
            with pytest.raises(LockLost), block, lock("a", scope=scope, using=name, max_hold=0.2):
                eventually(lambda: has_session_ended(connections[name]))
        with pytest.raises(LockLost), lock("a", scope="session", using=name, max_hold=0.2):
            eventually(lambda: locks_held() == 0)

        async def stall():
            async with lock("a", scope="transaction", using=name, max_hold=0.2):
                while await asyncio.to_thread(is_locked):
                    await asyncio.sleep(0.01)

        with pytest.raises(LockLost):
            asyncio.run(stall())
        assert_no_locks()


def is_locked():
    try:
        return locks_held() > 0
    finally:
        connections["default"].close()


def test_the_self_test_finds_that_session_locks_do_not_exclude(pgbouncer, alias):
    alias("pooled", NAME="two", **pgbouncer)
    findings = {text for text, is_ok in selftest("pooled") if not is_ok}
    assert findings == {"A session lock excludes other clients until it is freed."}


def test_coroutines_exclude_each_other_with_a_transaction_each(pgbouncer, alias):
    alias("pooled", NAME="two", **pgbouncer)
    inside = []

    async def visit():
        async with lock("a", scope="transaction", using="pooled"), semaphore("s", limit=1, scope="transaction"):
            inside.append(1)
            assert len(inside) == 1
            await asyncio.sleep(0.001)
            inside.pop()

    async def main():
        # As many as there are sessions; a third would wait for one and not for the lock.
        await asyncio.gather(*[visit() for _ in range(2)])

    for _ in range(5):
        asyncio.run(main())
    assert_no_locks()


def test_leases_need_no_session_and_work_here_as_anywhere(pgbouncer, alias, in_threads, eventually):
    """No notification arrives, so a waiter polls."""
    alias("pooled", NAME="one", **pgbouncer)
    with Lease("a", ttl=12, using="pooled") as lease, pytest.raises(LockNotAvailable):
        before = LeaseRow.objects.get().renewed_at
        eventually(lambda: LeaseRow.objects.get().renewed_at > before, why="it is not renewed")
        assert not lease.lost.is_set()
        with Lease("a", using="pooled"):
            pass
    tokens = []

    def lead(_):
        with leader("a", using="pooled") as leadership:
            tokens.append(leadership.token)

    in_threads(lead, 2)
    assert sorted(tokens) == [2, 3]
    LeaseRow.objects.all().delete()


def test_a_waiter_behind_it_finds_a_result_by_the_poll(pgbouncer, alias, in_threads, eventually, settings):
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 0.3}
    alias("pooled", NAME="two", **pgbouncer)
    ids = [int(tasks.nothing.enqueue().id) for _ in range(5)]

    def work(number):
        if number < 5:
            return await_end(ids[number], "pooled", 60)
        eventually(lambda: Waiter.objects.count() == 5)
        Task.objects.filter(pk__in=ids).update(status="SUCCESSFUL", finished_at=Now())
        return len(ids)

    assert in_threads(work, 6) == [True] * 5 + [5]
    eventually(lambda: not Waiter.objects.exists())
    Task.objects.filter(pk__in=ids).delete()


@pytest.fixture
def page(monkeypatch):
    """The settings of the page about PgBouncer, as a process has them that is started without an address of its own."""
    monkeypatch.delenv("DATABASE_HOST", raising=False)
    names = {}
    for code in blocks(ROOT / "docs" / "worker.md", "python", under="Run it behind PgBouncer"):
        exec(code, names)
    return names


@pytest.fixture
def shop(page, pgbouncer, alias, settings):
    """An alias with these settings: PgBouncer in transaction mode, where tasks are enqueued."""
    assert (page["DATABASES"]["default"]["HOST"], page["DATABASES"]["default"]["PORT"]) == ("pgbouncer", "6432")
    alias("shop", **{**page["DATABASES"]["default"], **pgbouncer, "NAME": "two"})
    # Polls are disabled, so only a notification wakes the worker.
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, **page["DJANGO_PGLOCK"], "USING": "shop", "POLL_INTERVAL": 600}
    settings.TASKS = {**settings.TASKS, "shop": {**settings.TASKS["default"], "OPTIONS": {"database": "shop"}}}


def a_worker_sleeps():
    return WorkerRow.objects.using("default").filter(is_sleeping=True).exists()


@pytest.mark.usefixtures("shop")
def test_the_settings_of_the_pgbouncer_page_work_without_others(worker, eventually):
    """The worker is connected directly, as the page says; tasks enqueued through PgBouncer wake it."""
    assert not [problem for problem in run_checks(databases=["shop"]) if problem.id == "django_pglock.W001"]
    with lock("a") as handle, lock("b"):
        assert handle.scope == "transaction"
        assert AdvisoryLock.objects.using("default").for_name("a").held().exists()
    worker(using="default")
    for _ in range(3):
        eventually(a_worker_sleeps)
        result = tasks.nothing.using(backend="shop").enqueue()
        eventually(lambda result=result: Task.objects.get(pk=result.id).status == "SUCCESSFUL")


def test_in_session_mode_locks_exclude_and_a_worker_polls(page, alias, worker, eventually, settings):
    connection.ensure_connection()
    databases = {"session": f"{way_to_server(connection.connection.info)} pool_size=20"}
    with PgBouncer(databases, mode="session") as pgbouncer:
        alias("pooled", NAME="session", HOST=str(pgbouncer.folder), PORT="")
        settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "USING": "pooled"}
        warned = [problem.id for problem in run_checks(databases=["pooled"]) if "pglock.W" in problem.id]
        assert warned == page["SILENCED_SYSTEM_CHECKS"], "it cannot know the mode"
        with lock("a"), try_lock("a", using="default") as held:
            assert not held
        settings.TASKS = {"default": {**settings.TASKS["default"], "OPTIONS": {"database": "pooled"}}}
        running = worker(using="pooled")
        try:
            result = tasks.nothing.enqueue()
            eventually(lambda: Task.objects.get(pk=result.id).status == "SUCCESSFUL")
        finally:
            running.shutdown()


@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_an_atomic_task_that_ends_its_session_behind_it_ends_failed(transactional_db, worker_process, eventually, mode):
    """PgBouncer passes on why the server has ended the session, and adds an error of its own."""
    connection.ensure_connection()
    databases = {"pooled": f"{way_to_server(connection.connection.info)} pool_size=10"}
    with PgBouncer(databases, mode=mode) as pgbouncer:
        process = worker_process("--threads", "4", url=pgbouncer.url("pooled"))
        for how in ("close_as_django_does", "idle_for_too_long", "hide_end_on_cursor"):
            session_tasks.end_session_by.enqueue(how)
        session_tasks.close_after_cut.enqueue()
        unfinished = Task.objects.exclude(status__in=("SUCCESSFUL", "FAILED"))
        eventually(lambda: not unfinished.exists(), why=process.output)
        process.end()
    assert list(Task.objects.order_by("id").values_list("status", flat=True)) == [*["FAILED"] * 3, "SUCCESSFUL"]
    outcomes = Counter(Attempt.objects.values_list("outcome", flat=True))
    # The function that has closed its session fails twice. Each of the others counts as deaths of a worker first.
    assert outcomes.keys() == {"FAILED", "LOST"}
    assert outcomes["FAILED"] == 4


def test_workers_that_share_sessions_behind_it_prepare_nothing(pgbouncer, task_alias, worker, eventually, caplog):
    """The statements of two workers would have the same names."""
    task_alias("pooled", NAME="one", **pgbouncer)
    for _ in range(2):
        worker(using="pooled", threads=1)
    made = [tasks.nothing.enqueue() for _ in range(20)]
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == len(made))
    assert "prepared statement" not in caplog.text
