"""Semaphores: their slots, and the queue of waiters."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
from django.db import connection, connections, transaction

from django_pglock import LockError, LockNotAvailable, lock, semaphore
from django_pglock.locks import statements as lock_statements
from tests.conftest import NEVER

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_waiter_of_a_semaphore_sends_one_statement_and_no_error(somebody):
    somebody.holds("s#1")
    somebody.holds("s#2")
    statements = []

    def count(execute, sql, params, many, context):
        statements.append(sql)
        return execute(sql, params, many, context)

    for context in (transaction.atomic(), lock("unrelated")):
        with context, connection.execute_wrapper(count):
            with pytest.raises(LockNotAvailable) as caught:
                semaphore("s", limit=2, timeout=0.3).acquire()
            assert caught.value.sqlstate is None, "the server reported no error"
        assert len(statements) == 1
        statements.clear()


def test_a_wait_ends_although_the_clock_is_put_back_meanwhile(somebody, monkeypatch):
    """As if the statement had begun an hour later."""
    look = lock_statements.look_for_slot
    hour = "(statement_timestamp() + interval '1 hour')"
    monkeypatch.setattr(
        lock_statements, "look_for_slot", lambda *request: look(*request).replace("statement_timestamp()", hour)
    )
    somebody.holds("s#1")
    with transaction.atomic(), pytest.raises(LockNotAvailable), connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL statement_timeout = '{NEVER}s'")
        semaphore("s", limit=1, timeout=0.1).acquire()


def test_a_waiter_gets_the_first_free_slot(somebody, in_threads, eventually):
    somebody.holds("s#1")
    somebody.holds("s#2")

    def work(number):
        if number:
            with semaphore("s", limit=2, timeout=60) as slot:
                return slot.key
        eventually(lambda: somebody.ask("SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%%RECURSIVE look%%'"))
        return somebody.ask("SELECT pg_advisory_unlock(%s)", keys[1])

    keys = semaphore("s", limit=2)._request_for(("s",)).numbers
    assert in_threads(work, 2)[1] == keys[1]


def test_waiters_of_a_semaphore_are_served_in_the_order_of_their_arrival(somebody, eventually):
    somebody.holds("s#1")
    served, threads = [], []

    def work(number):
        with semaphore("s", limit=1, timeout=60):
            served.append(number)
        connections.close_all()

    for number in range(4):
        threads.append(threading.Thread(target=work, args=(number,)))
        threads[-1].start()
        eventually(lambda number=number: somebody.ask(ARRIVED) == number + 1)
    with pytest.raises(LockNotAvailable):
        semaphore("s", limit=1, timeout=0).acquire()
    somebody.leaves()
    for thread in threads:
        thread.join()
    assert served == [0, 1, 2, 3]


def test_the_list_of_locks_names_the_slots_and_the_queue_of_a_semaphore(somebody, eventually):
    somebody.holds("s#1")
    names = []

    def work():
        with semaphore("s", limit=2, timeout=60), semaphore("s", limit=2, timeout=0.5):
            pass
        connections.close_all()

    def both_are_named():
        # By another session, because this one shows its last statement, which names the slot.
        names[:] = somebody.ask(
            "SELECT array_agg(name ORDER BY name) FROM django_pglock_advisorylock WHERE name IS NOT NULL"
        )
        return names == ["s#2", "s#queue"]

    def ignore_busy():
        with suppress(LockError):
            work()
        connections.close_all()

    with semaphore("s", limit=2, timeout=60):
        thread = threading.Thread(target=ignore_busy)
        thread.start()
        eventually(both_are_named, why=f"{names}")
    thread.join()


ARRIVED = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%%RECURSIVE look%%' AND pid <> pg_backend_pid()"  # noqa: E501
