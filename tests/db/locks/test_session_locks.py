"""A lock ends with its owner: a transaction, a savepoint, a block, a handle or a thread."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from contextlib import suppress

import pytest
from django.db import DatabaseError, IntegrityError, connection, connections, transaction
from django.test import TestCase

from django_pglock import LockError, LockLost, lock
from tests.conftest import NEVER
from tests.db.locks.sessions import Somebody, execute, my_pid, statements_of
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


# Handles report the state of their lock


def test_a_handle_of_a_transaction_is_over_with_it():
    for end in (lambda: None, lambda: transaction.set_rollback(True)):
        with transaction.atomic():
            with lock("a") as handle:
                pass
            assert handle
            handle.assert_held()
            with pytest.raises(LockError, match="already"):
                lock("a", reentrant=False).acquire()
            end()
        assert not handle
        with pytest.raises(LockLost, match="not held"):
            handle.assert_held()
        with transaction.atomic():
            assert not handle, "that is another transaction"
            Effect.objects.exists()
            assert not handle
            lock("a", reentrant=False).acquire()


def test_a_handle_is_over_with_the_savepoint_that_freed_it(somebody):
    with transaction.atomic():
        outer = lock("outer").acquire()
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            inner = lock("inner").acquire()
            1 / 0  # noqa: B018
        assert somebody.can_have("inner")
        assert (bool(outer), bool(inner)) == (True, False)
        with transaction.atomic():
            kept = lock("kept").acquire()
        assert not somebody.can_have("kept")
        assert kept, "a savepoint that is released frees nothing"
        sid = getattr(transaction, "savepoint_create", transaction.savepoint)()
        again = lock("again").acquire()
        with transaction.atomic():
            nested = lock("nested").acquire()
        transaction.savepoint_rollback(sid)
        assert [bool(each) for each in (outer, kept, again, nested)] == [True, True, False, False]


# Handles without a reference


def test_a_handle_that_is_dropped_frees_its_lock(somebody, caplog):
    lock("a").acquire()
    assert somebody.can_have("a")
    assert "'a' was released because its handle was deleted" in caplog.text
    with transaction.atomic():
        lock("b").acquire()
        assert not somebody.can_have("b"), "this one is the transaction's"


@pytest.mark.parametrize("one_for_all", [False, True])
@pytest.mark.parametrize("busy", [False, True])
def test_a_generator_that_another_thread_closes_frees_its_lock(somebody, one_for_all, busy, eventually):
    """The session belongs to another thread, which may be using it at that moment."""
    one = lock("a")

    def numbers():
        with one if one_for_all else lock("a"):
            yield 1

    begun, closed, left = [], threading.Event(), threading.Event()

    def work():
        generator = numbers()
        next(generator)
        begun.append(generator)
        if busy:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_lock(4711)")
                cursor.execute("SELECT pg_advisory_unlock(4711)")
        closed.wait(60)
        left.wait(60)
        connections.close_all()

    if busy:
        somebody.ask("SELECT pg_advisory_lock(4711)")
    thread = threading.Thread(target=work)
    thread.start()
    try:
        eventually(lambda: begun and (not busy or somebody.ask(WAITING)))
        begun.pop().close()
        if busy:
            somebody.ask("SELECT pg_advisory_unlock(4711)")
        closed.set()
        eventually(lambda: somebody.can_have("a"), why="the lock is held forever")
    finally:
        closed.set()
        left.set()
        thread.join()


WAITING = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = 4711"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_a_thread_that_ends_frees_what_it_holds(somebody, eventually):
    kept, sessions = [], []

    def work():
        kept.append(lock("a").acquire())
        sessions.append(weakref.ref(connection.connection))

    def is_deleted():
        gc.collect()
        return sessions[0]() is None

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    kept.clear()
    gc.collect()
    eventually(lambda: somebody.can_have("a"))
    # A later test would not ignore the warning about the session that is not closed.
    eventually(is_deleted, why="the session is kept")


# TestCase


class InsideTestCase(TestCase):
    def test_an_error_in_the_body_leaves_the_connection_of_the_class(self):
        raw = connection.connection
        sid = getattr(transaction, "savepoint_create", transaction.savepoint)()
        with self.assertRaises(IntegrityError), lock("a"), lock("b", timeout=1):
            Effect.objects.bulk_create([Effect(pk=1, name="x"), Effect(pk=1, name="x")])
        self.assertIs(connection.connection, raw)
        self.assertFalse(raw.closed)
        transaction.set_rollback(False)
        transaction.savepoint_rollback(sid)
        self.assertFalse(Effect.objects.exists())
        other = Somebody()
        try:
            for name in ("a", "b"):
                # Another thread frees what could not be freed then.
                deadline = time.monotonic() + NEVER
                while not other.can_have(name):
                    self.assertLess(time.monotonic(), deadline, name)
                    time.sleep(0.01)
        finally:
            other.leaves()


# Broken transactions and sessions, many owners


def test_a_lock_that_is_lost_inside_atomic_does_not_break_the_transaction_in_two(somebody):
    """A reconnect inside the block would commit the later statements without the earlier ones."""
    handle = lock("a").acquire()
    with pytest.raises(DatabaseError), transaction.atomic():
        Effect.objects.create(name="before")
        somebody.ends_session(my_pid())
        with pytest.raises(LockLost):
            handle.release()
        Effect.objects.create(name="after")
    assert not Effect.objects.exists()


def test_a_lock_that_is_given_back_in_a_broken_transaction_is_freed_after_its_rollback(somebody, eventually):
    handle = lock("a").acquire()
    with pytest.raises(ValueError, match="mine"), transaction.atomic():
        with pytest.raises(DatabaseError), connection.cursor() as cursor:
            cursor.execute("SELECT 1 / 0")
        handle.release()
        raise ValueError("mine")
    eventually(lambda: somebody.can_have("a"), why="nobody sends another statement, and it is held forever")


def test_a_handle_asks_the_server_whether_sql_has_freed_its_lock():
    with transaction.atomic():
        execute("SAVEPOINT mine")
        mine = lock("mine").acquire()
        execute("SELECT 1; ROLLBACK TO mine")
        assert mine, "Django has rolled back nothing"
        with pytest.raises(LockLost, match="its transaction, or the savepoint before it, has ended"):
            mine.assert_held()
        assert not mine
        lock("mine", reentrant=False).acquire()


def test_a_handle_asks_the_server_only_after_a_rollback():
    with transaction.atomic():
        handle = lock("a").acquire()
        assert statements_of(lambda: bool(handle)) == 0
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            1 / 0  # noqa: B018
        assert statements_of(lambda: bool(handle)) == 1
        assert statements_of(lambda: bool(handle)) == 0
        with pytest.raises(DatabaseError), transaction.atomic():
            execute("SELECT 1 / 0")
        with suppress(DatabaseError):
            execute("SELECT 1 / 0")
        assert handle, "an aborted transaction has its locks until its rollback, and it cannot be asked"


def test_another_thread_may_ask_whether_it_is_held(in_threads):
    with lock("a") as handle:
        in_threads(lambda _: handle.assert_held(), 1)
