"""Transaction locks: one statement, released by the transaction, and refused where they would not protect."""

from __future__ import annotations

import threading

import pytest
from django.db import connection, transaction
from psycopg import IsolationLevel

from django_pglock import LockNotAvailable, LockScopeError, lock, lock_all, semaphore
from tests.db.locks.sessions import Somebody, advisory_rows, execute, statements_of
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("timeout", [None, 0, 5])
def test_in_a_transaction_one_statement_acquires_and_none_frees(timeout):
    with transaction.atomic():

        def use():
            with lock("a", timeout=timeout):
                pass

        assert statements_of(use) == 1


def test_in_a_transaction_a_second_statement_waits_for_a_busy_lock(somebody):
    somebody.holds("a")

    def use():
        with pytest.raises(LockNotAvailable):
            lock("a", timeout=0.01).acquire()

    with transaction.atomic():
        assert statements_of(use) == 3, "the third one rolls back to the savepoint before the wait"


@pytest.fixture
def isolation():
    """Reconnect at another isolation level, as OPTIONS would have it."""

    def use(level):
        connection.close()
        connection.settings_dict["OPTIONS"]["isolation_level"] = level
        connection.ensure_connection()

    before = dict(connection.settings_dict["OPTIONS"])
    yield use
    connection.close()
    connection.settings_dict["OPTIONS"] = before
    connection.ensure_connection()


@pytest.mark.parametrize("level", [IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
def test_a_lock_that_is_younger_than_the_snapshot_is_refused(isolation, level):
    isolation(level)
    with transaction.atomic():
        for scope in ("auto", "transaction"):
            with pytest.raises(LockScopeError, match="snapshot is older"), lock("a", scope=scope):
                pass
        with lock("a", stale_ok=True):
            pass
    with lock("a") as handle, transaction.atomic():
        assert handle.scope == "session", "taken before BEGIN, it is older than the snapshot"
    with pytest.raises(LockScopeError, match=r"the transaction that it opens is .* Use scope='session'") as refused:
        lock("a", scope="transaction").__enter__()
    assert "outside the transaction" not in str(refused.value), "there is none"
    assert advisory_rows() == 0


def test_a_lock_waiter_with_an_older_snapshot_reads_old_data(isolation, in_threads):
    """The statement that waits for the lock takes the snapshot before it waits. Later statements read old data."""
    Effect.objects.create(name="counter", number=0)
    is_held, read = threading.Event(), {}

    def work(number):
        if number == 1:
            is_held.wait(60)
            connection.settings_dict["OPTIONS"]["isolation_level"] = IsolationLevel.REPEATABLE_READ
            connection.close()
            with transaction.atomic(), lock("counter", stale_ok=True):
                read["stale"] = Effect.objects.get(name="counter").number
            with lock("counter"), transaction.atomic():
                read["fresh"] = Effect.objects.get(name="counter").number
            return
        with transaction.atomic(), lock("counter"):
            is_held.set()
            other = Somebody()
            while not other.ask("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"):
                pass
            other.leaves()
            Effect.objects.filter(name="counter").update(number=1)

    in_threads(work, 2)
    assert read == {"stale": 0, "fresh": 1}


@pytest.mark.parametrize("how", ["SET TRANSACTION", "role", "database", "options"])
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_stale_snapshot_is_refused_wherever_it_is_configured(how, level, somebody):
    setting_name = "default_transaction_isolation"
    value = level.lower()
    undo = None
    if how == "role":
        execute(f"ALTER ROLE CURRENT_USER SET {setting_name} = '{value}'")
        undo = f"ALTER ROLE CURRENT_USER RESET {setting_name}"
    elif how == "database":
        name = connection.ops.quote_name(connection.settings_dict["NAME"])
        execute(f"ALTER DATABASE {name} SET {setting_name} = '{value}'")
        undo = f"ALTER DATABASE {name} RESET {setting_name}"
    elif how == "options":
        execute(f"SET {setting_name} = '{value}'")
        undo = f"RESET {setting_name}"
    try:
        if how in ("role", "database"):
            connection.close()
        with transaction.atomic():
            if how == "SET TRANSACTION":
                execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
            for options in ({}, {"timeout": 0}, {"timeout": 1}, {"max_hold": 60}, {"timeout": 0, "max_hold": 60}):
                with pytest.raises(LockScopeError, match="snapshot is older"):
                    lock("a", **options).acquire()
            with pytest.raises(LockScopeError, match="snapshot is older"):
                lock_all("a", "b", timeout=1).acquire()
            for timeout in (1, None):
                with pytest.raises(LockScopeError, match="snapshot is older"):
                    semaphore("s", limit=2, timeout=timeout).acquire()
            assert advisory_rows() == 0
            assert not Effect.objects.exists(), "the transaction is usable"
            lock("a", stale_ok=True, timeout=1).acquire()
            assert advisory_rows() == 1
        with lock("a", timeout=1) as handle:
            assert handle.scope == "session", "it is older than any snapshot"
    finally:
        if undo:
            execute(undo)
        connection.close()
