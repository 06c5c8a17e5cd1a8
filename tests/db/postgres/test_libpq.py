"""Statements sent below Django's cursor. Observers (wrappers, logs, tests) see them as usual."""

from __future__ import annotations

import threading
import time

import pytest
from django.db import OperationalError, ProgrammingError, connections, transaction
from django.db.backends.utils import CursorWrapper
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext
from psycopg import IsolationLevel
from psycopg.errors import DivisionByZero
from psycopg.pq import TransactionStatus

from django_pglock import lock
from django_pglock.postgres.message import send
from tests.db.locks.sessions import advisory_rows, my_pid

#: Django's own object, not the one that stands for it in django.db.
connection = connections["default"]
pytestmark = pytest.mark.django_db(transaction=True)


def test_send_returns_the_first_row_of_the_last_result():
    assert send(connection, "SELECT 1;SELECT true, 2::bigint, 'x', NULL UNION ALL SELECT false, 3, 'y', 'z'") == [
        *(True, 2, "x", None)
    ]
    assert send(connection, "SELECT 1 WHERE false") is None
    assert send(connection, "SET LOCAL lock_timeout = 0; RESET lock_timeout") is None
    assert send(connection, "SELECT repeat('x', 3000000)")[0] == "x" * 3_000_000
    assert send(connection, f"SELECT length('{'x' * 3_000_000}')") == ["3000000"]


def test_errors_are_djangos_with_all_that_psycopg_knows():
    with pytest.raises(Exception, match="division by zero") as caught:
        send(connection, "SELECT 1;SELECT 1/0")
    assert isinstance(caught.value.__cause__, DivisionByZero)
    assert caught.value.__cause__.diag.sqlstate == "22012"
    with pytest.raises(ProgrammingError, match="syntax"):
        send(connection, "SELEC")
    assert send(connection, "SELECT true") == [True]
    with transaction.atomic():
        with pytest.raises(ProgrammingError), transaction.atomic():
            send(connection, "SELEC")
        assert send(connection, "SELECT true") == [True]
        transaction.set_rollback(True)
        with pytest.raises(TransactionManagementError):
            send(connection, "SELECT true")


def test_a_statement_in_an_ended_session_raises_an_operational_error(somebody):
    pid = my_pid()
    somebody.ends_session(pid)
    with pytest.raises(OperationalError):
        for _ in range(100):
            send(connection, "SELECT pg_sleep(0.01)")
    connection.close()
    assert send(connection, "SELECT true") == [True]


def test_the_first_statement_of_a_transaction_begins_it():
    """psycopg sends BEGIN with its first statement. Without a transaction, a transaction lock would end at once."""
    with transaction.atomic():
        send(connection, "SELECT pg_advisory_xact_lock(1)")
        assert connection.connection.info.transaction_status == TransactionStatus.INTRANS
        assert advisory_rows() == 1
    assert advisory_rows() == 0
    for timeout in (None, 0, 5):
        with transaction.atomic(), lock("a", timeout=timeout):
            assert advisory_rows() == 1
        with lock("a", timeout=timeout, scope="transaction"):
            assert advisory_rows() == 1


def test_a_transaction_that_begins_otherwise_is_begun_by_psycopg():
    connection.ensure_connection()
    connection.connection.isolation_level = IsolationLevel.SERIALIZABLE
    try:
        with transaction.atomic():
            assert send(connection, "SHOW transaction_isolation") == ["serializable"]
    finally:
        connection.connection.isolation_level = None


def test_execute_wrappers_see_the_statements_of_locks(monkeypatch):
    seen = []

    def wrapper(execute, sql, params, many, context):
        seen.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(wrapper), lock("a"):
        pass
    assert len(seen) == 2
    with CaptureQueriesContext(connection) as queries, lock("a"):
        pass
    assert len(queries) == 2
    execute = CursorWrapper.execute
    monkeypatch.setattr(
        CursorWrapper, "execute", lambda self, sql, params=None: (seen.append(sql), execute(self, sql, params))[1]
    )
    with lock("a"):
        pass
    assert len(seen) == 4
    monkeypatch.undo()
    monkeypatch.setattr(connection, "cursor", lambda cursor=connection.cursor: (seen.append("cursor"), cursor())[1])
    with lock("a"):
        pass
    assert seen[4:] == ["cursor", "cursor"]


def test_a_wait_for_a_lock_does_not_block_other_threads(somebody, in_threads):
    """The wait for the answer must release the GIL."""
    somebody.holds("a")
    beats = []

    def work(number):
        if number == 0:
            for _ in range(50):
                time.sleep(0.002)
                beats.append(threading.get_ident())
            somebody.leaves()
        else:
            with lock("a", timeout=60):
                return len(beats)

    assert in_threads(work, 2)[1] == 50
