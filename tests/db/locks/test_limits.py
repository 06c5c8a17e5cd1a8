"""Holders that stall lose their lock, and a wait that fails leaves nothing."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext

import pytest
from django.db import connection, transaction

from django_pglock import LockLost, LockNotAvailable, lock, try_lock
from django_pglock.postgres.connections import has_session_ended
from tests.db.locks.sessions import advisory_rows, setting
from tests.sample.models import Effect
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_holder_that_stalls_loses_the_lock_and_gets_an_error(somebody, eventually, in_transaction):
    """A request that hangs in a call to another service must not keep the lock forever."""
    with pytest.raises(LockLost), lock("a", scope="session", max_hold=1) as handle:
        execute_sql("BEGIN" if in_transaction else "SELECT 1")
        eventually(lambda: somebody.can_have("a"), why="the lock was kept")
        # The server frees the lock a moment before it closes its end of the connection.
        with pytest.raises(LockLost):
            eventually(handle.assert_held)
    with lock("a"):
        pass


@pytest.mark.parametrize("in_atomic", [False, True])
def test_a_holder_of_a_transaction_lock_that_stalls_gets_the_same_error(eventually, in_atomic):
    """Before, it got the error of the COMMIT, which did not name the lock."""
    block = transaction.atomic if in_atomic else nullcontext
    with pytest.raises(LockLost, match="'a' was lost"), block(), lock("a", scope="transaction", max_hold=0.2) as handle:
        Effect.objects.create(name="undone")
        eventually(lambda: has_session_ended(connection))
        with pytest.raises(LockLost):
            handle.assert_held()
    assert not Effect.objects.exists()
    with lock("a", scope="transaction"):
        Effect.objects.create(name="done")
    assert Effect.objects.count() == 1


def test_a_coroutine_that_exceeds_max_hold_loses_the_lock(somebody):
    async def main():
        with pytest.raises(LockLost):
            async with lock("a", max_hold=0.2):
                deadline = time.monotonic() + 60
                while not await asyncio.to_thread(somebody.can_have, "a"):
                    assert time.monotonic() < deadline, "the lock was kept"
        async with lock("b", max_hold=5):
            pass

    asyncio.run(main())


@pytest.mark.parametrize("max_hold", [0, -1, "1", True])
def test_an_invalid_max_hold_is_refused(max_hold):
    with pytest.raises(ValueError, match="max_hold"):
        lock("a", max_hold=max_hold)


def test_limits_on_holding_are_put_back_in_any_order():
    def limit():
        return setting("idle_session_timeout")

    one, two = lock("a", max_hold=20).acquire(), lock("b", max_hold=100).acquire()
    one.release()
    assert limit() == "100s" or limit() == "1min40s" or limit() == "100000"
    two.release()
    assert limit() == "0"


# Failures


def test_a_deadlock_is_no_busy_lock_and_leaves_nothing(in_threads):
    """PostgreSQL ends one of two waiters that wait for each other. This waiter gets the deadlock error unchanged."""
    import threading

    both = threading.Barrier(2)

    def work(number):
        first, second = ("a", "b") if number else ("b", "a")
        try:
            with lock(first):
                both.wait(60)
                with lock(second):
                    return "held"
        except Exception as error:
            return str(error.__cause__).splitlines()[0]
        finally:
            assert advisory_rows() == 0

    assert sorted(in_threads(work, 2)) == ["deadlock detected", "held"]


@pytest.mark.parametrize("scope", ["session", "transaction"])
def test_ctrl_c_while_waiting_leaves_nothing(somebody, scope, request, eventually):
    import _thread
    import signal
    import threading

    # Some test runners ignore the signal.
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, earlier))
    somebody.holds("a")

    def interrupt_who_waits():
        eventually(lambda: somebody.ask("SELECT count(*) FROM pg_locks WHERE NOT granted"), why="nobody waits")
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt_who_waits)
    thread.start()
    with pytest.raises(KeyboardInterrupt), lock("a", scope=scope, timeout=300):
        pytest.fail("the body ran without the lock")
    thread.join()
    assert advisory_rows() == 0
    assert execute_sql("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")[0][0] == 0
    with try_lock("b") as held:
        assert held


def test_a_waiter_whose_session_is_ended_gets_that_error_and_not_busy(somebody, in_threads, eventually):
    somebody.holds("a")

    def work(number):
        if number == 0:
            pid = eventually(
                lambda: somebody.ask("SELECT max(pid) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
            )
            somebody.ends_session(pid)
            return None
        with pytest.raises(Exception, match="terminat") as caught, lock("a", timeout=60):
            pass
        assert not isinstance(caught.value, LockNotAvailable)
        with lock("b"):
            return advisory_rows()

    assert in_threads(work, 2)[1] == 1
