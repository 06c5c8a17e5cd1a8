"""Statements sent below Django's cursor, by psycopg's generators. Observers (wrappers, logs, tests) see them as usual.

psycopg does not document its generators. Each supported psycopg must have what is used here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import nullcontext

import pytest
from django.db import ProgrammingError, connections, transaction
from django.db.backends.utils import CursorWrapper
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext
from psycopg import IsolationLevel, generators
from psycopg import OperationalError as PsycopgOperationalError
from psycopg.errors import AdminShutdown, DivisionByZero
from psycopg.pq import TransactionStatus

from django_pglock import Lease, LockNotAvailable, lock
from django_pglock.postgres import exchange, message
from django_pglock.postgres.message import send
from tests.conftest import NEVER
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


def test_an_error_knows_how_many_statements_of_the_caller_were_accepted():
    for accepted, begins in ((0, False), (2, False), (2, True)):
        with pytest.raises(ProgrammingError) as caught, transaction.atomic() if begins else nullcontext():
            send(connection, "SELECT 1;" * accepted + "SELECT nothing")
        assert caught.value.__cause__.accepted == accepted


@pytest.mark.parametrize("is_async", [False, True])
def test_the_error_of_a_session_that_ends_has_the_servers_last_error_as_its_cause(somebody, is_async):
    connection.ensure_connection()
    raw, sleeps = connection.connection, "SELECT pg_sleep(600)"
    ending = threading.Thread(target=lambda: somebody.ends_session(until_sleeping(somebody)))
    ending.start()
    with pytest.raises(PsycopgOperationalError) as caught:
        asyncio.run(exchange.exchange_async(raw, sleeps)) if is_async else exchange.exchange(raw, sleeps)
    ending.join()
    assert isinstance(caught.value.__cause__, AdminShutdown)
    connection.close()
    assert send(connection, "SELECT true") == [True]


@pytest.fixture
def no_generators(monkeypatch):
    """A psycopg without the generators. One that has them all is used with them."""
    assert exchange.HAS_GENERATORS
    for module in (exchange, message):
        monkeypatch.setattr(module, "HAS_GENERATORS", False)
    for name in ("send", "fetch"):
        monkeypatch.delattr(generators, name)


def test_locks_work_with_a_psycopg_without_the_generators(no_generators, somebody, eventually):
    async def main():
        async with lock("a", timeout=5), lock("b", scope="transaction"), Lease("c", ttl=5) as lease:
            with pytest.raises(LockNotAvailable):
                await asyncio.create_task(lock("a", timeout=0).aacquire())
            await lease.extend(60)

    with lock("a"), pytest.raises(LockNotAvailable), transaction.atomic():
        somebody.holds("b")
        lock("b", timeout=0.01).acquire()
    somebody.leaves()
    lock("a").acquire()
    eventually(lambda: advisory_rows() == 0, why="the lock of a handle that was dropped is held")
    asyncio.run(main())
    with pytest.raises(DivisionByZero):
        exchange.exchange(connection.connection, "SELECT 1/0")


def until_sleeping(somebody):
    """Wait until a session executes ``pg_sleep``, and return its process."""
    query = "SELECT max(pid) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%%' AND state = 'active'"
    limit = time.monotonic() + NEVER
    while (pid := somebody.ask(query)) is None and time.monotonic() < limit:
        time.sleep(0.01)
    return pid


class Interrupt(BaseException):
    """What a signal handler raises."""


def interrupt(*_arguments):
    raise Interrupt


@pytest.fixture
def raises():
    """Signal handlers that raise."""
    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_an_exception_of_a_signal_handler_cancels_the_statement_and_the_session_goes_on(somebody, raises):
    pid = my_pid()

    def send_signal():
        until_sleeping(somebody)
        os.kill(os.getpid(), signal.SIGUSR1)

    for _ in range(3):
        other = threading.Thread(target=send_signal)
        other.start()
        with pytest.raises(Interrupt):
            send(connection, "SELECT pg_sleep(600)")
        other.join()
        assert my_pid() == pid
        assert send(connection, "SELECT true") == [True]


def test_an_exception_of_a_notification_handler_leaves_the_session_usable(somebody):
    connection.ensure_connection()
    raw = connection.connection
    raw.add_notify_handler(interrupt)
    send(connection, "LISTEN heard")
    with somebody.connection.cursor() as cursor:
        cursor.execute("NOTIFY heard")
    # It arrives with the first answer. This answer does not stay in the server's buffer, because it is too large.
    large = "SELECT repeat('x', 100000);"
    with pytest.raises(Interrupt):
        send(connection, f"{large}{large}SELECT pg_sleep(600)")
    raw.remove_notify_handler(interrupt)
    assert send(connection, "UNLISTEN heard;SELECT true") == [True]


def test_a_cancelled_coroutine_cancels_its_statement_and_the_session_goes_on(somebody):
    connection.ensure_connection()
    raw, pid = connection.connection, my_pid()

    async def main():
        asleep = asyncio.ensure_future(exchange.exchange_async(raw, "SELECT pg_sleep(600)"))
        await asyncio.to_thread(until_sleeping, somebody)
        asleep.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asleep
        return await exchange.exchange_async(raw, "SELECT pg_backend_pid()::bigint")

    assert asyncio.run(main()) == [pid]


@pytest.mark.skipif(os.geteuid() != 0, reason="stops a process of the server")
@pytest.mark.parametrize("is_async", [False, True])
def test_a_server_that_does_not_answer_a_cancel_request_costs_the_session(somebody, raises, monkeypatch, is_async):
    monkeypatch.setattr(exchange, "CANCEL_WITHIN", 0.2)
    connection.ensure_connection()
    raw, stopped = connection.connection, []

    def stop_it():
        stopped.append(until_sleeping(somebody))
        os.kill(stopped[0], signal.SIGSTOP)

    def stop_and_interrupt():
        stop_it()
        os.kill(os.getpid(), signal.SIGUSR1)

    async def main():
        asleep = asyncio.ensure_future(exchange.exchange_async(raw, "SELECT pg_sleep(600)"))
        await asyncio.to_thread(stop_it)
        asleep.cancel()
        await asleep

    other = threading.Thread(target=(lambda: None) if is_async else stop_and_interrupt)
    other.start()
    try:
        with pytest.raises(asyncio.CancelledError if is_async else Interrupt):
            asyncio.run(main()) if is_async else send(connection, "SELECT pg_sleep(600)")
        assert raw.closed
        assert not raw.lock.locked()
    finally:
        other.join()
        os.kill(stopped[0], signal.SIGCONT)
        connection.close()


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


@pytest.mark.parametrize("is_async", [False, True])
def test_a_transaction_begins_with_all_options_of_its_connection(is_async):
    """A lock in a transaction that began otherwise would not protect what the caller reads."""
    connection.ensure_connection()
    raw = connection.connection
    raw.isolation_level, raw.read_only, raw.deferrable = IsolationLevel.SERIALIZABLE, True, True
    asks = (
        "SELECT concat_ws(' ', current_setting('transaction_isolation'), current_setting('transaction_read_only'),"
        " current_setting('transaction_deferrable'))"
    )
    try:
        with transaction.atomic():
            found = asyncio.run(exchange.exchange_async(raw, asks)) if is_async else send(connection, asks)
        assert found == ["serializable on on"]
    finally:
        raw.isolation_level = raw.read_only = raw.deferrable = None


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
