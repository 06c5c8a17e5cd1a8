"""Holders that stall, long waits and holds in the log, and the holder in the error."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import nullcontext

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.test import override_settings

from django_pglock import LockLost, LockNotAvailable, lock, lock_all, try_lock
from django_pglock.postgres.connections import has_session_ended
from tests.db.locks.sessions import advisory_rows, execute, my_pid, setting, statements_of
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)
LIMITS = ("idle_session_timeout", "idle_in_transaction_session_timeout")


@pytest.mark.parametrize("timeout", [None, 0, 5])
@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_max_hold_is_in_force_while_the_lock_is_held_and_then_as_it_was(timeout, names):
    with connection.cursor() as cursor:
        cursor.execute("SET idle_session_timeout = '7min'")

    def use():
        with lock_all(*names, timeout=timeout, max_hold=30):
            pass

    with lock_all(*names, timeout=timeout, max_hold=30):
        assert [setting(name) for name in LIMITS] == ["30s", "30s"]
        with lock("inner", max_hold=10):
            assert setting(LIMITS[0]) == "10s"
        assert setting(LIMITS[0]) == "30s"
    assert [setting(name) for name in LIMITS] == ["7min", "0"]
    assert statements_of(use) == 2
    connection.close()


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_a_failed_acquire_leaves_the_session_settings(somebody, timeout):
    somebody.holds("a")
    with pytest.raises(LockNotAvailable), lock("a", timeout=timeout, max_hold=30):
        pass
    assert [setting(name) for name in LIMITS] == ["0", "0"]


@pytest.mark.parametrize("timeout", [None, 0, 5])
def test_in_a_transaction_max_hold_ends_with_it(timeout):
    with transaction.atomic(), lock("a", timeout=timeout, max_hold=30):
        assert setting(LIMITS[1]) == "30s"
    assert setting(LIMITS[1]) == "0"


@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_holder_that_stalls_loses_the_lock_and_gets_an_error(somebody, eventually, in_transaction):
    """A request that hangs in a call to another service must not keep the lock forever."""
    with pytest.raises(LockLost), lock("a", scope="session", max_hold=1) as handle:
        with connection.cursor() as cursor:
            cursor.execute("BEGIN" if in_transaction else "SELECT 1")
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


def test_a_session_that_ends_in_the_commit_of_a_lock_is_reported_as_a_lost_lock():
    """No check before the COMMIT can see it."""
    execute("CREATE TEMP TABLE last (number int)")
    execute(
        "CREATE FUNCTION pg_temp.leave() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(60); RETURN NULL; END'"
    )
    execute(
        "CREATE CONSTRAINT TRIGGER leave AFTER INSERT ON last DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION pg_temp.leave()"
    )
    with pytest.raises(LockLost, match="its session has ended") as lost, lock("a", scope="transaction"):
        execute("INSERT INTO last VALUES (1)")
    assert isinstance(lost.value.__cause__, DatabaseError)
    with lock("a", scope="transaction"):
        Effect.objects.create(name="done")
    assert Effect.objects.count() == 1


def test_an_error_of_the_commit_of_a_lock_is_passed_on_if_the_session_lives():
    execute("CREATE TEMP TABLE once (number int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    with pytest.raises(IntegrityError), lock("a", scope="transaction"):
        execute("INSERT INTO once VALUES (1), (1)")
    assert advisory_rows() == 0


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


# What the log says


def messages(caplog, level):
    return [record for record in caplog.records if record.name == "django_pglock.locks" and record.levelno == level]


def test_short_waits_and_holds_are_not_logged_at_info(caplog):
    with caplog.at_level(logging.INFO), lock("a"):
        pass
    assert caplog.records == []
    with caplog.at_level(logging.DEBUG), lock("a"):
        pass
    assert [record.lock for record in messages(caplog, logging.DEBUG)] == ["a", "a"]


@override_settings(DJANGO_PGLOCK={"SLOW_WAIT": 0.05, "SLOW_HOLD": 0.05})
def test_long_waits_and_holds_are_warned_of(somebody, in_threads, caplog, eventually):
    somebody.holds("a")
    waited = "SELECT count(*) FROM pg_locks WHERE NOT granted AND waitstart < clock_timestamp() - interval '60 ms'"

    def work(number):
        if number == 0:
            eventually(lambda: somebody.ask(waited), why="nobody waits")
            somebody.leaves()
        else:
            with lock("a"):
                time.sleep(0.06)

    in_threads(work, 2)
    took, gave_back = messages(caplog, logging.WARNING)
    assert took.waited > 0.05
    assert gave_back.held > 0.05
    assert "Acquired lock 'a'" in took.getMessage()
    assert "longer than 0.05 s" in gave_back.getMessage()


# Who it is


def test_the_error_names_the_holder_on_request(somebody):
    somebody.holds("a")
    pid = somebody.ask("SELECT pg_backend_pid()")
    with pytest.raises(LockNotAvailable) as caught, lock("a", timeout=0):
        pass
    assert statements_of(caught.value.holders) == 1
    [holder] = caught.value.holders()
    assert (holder.pid, holder.name) == (pid, "a"), "the name that was asked for, which this holder has not written"
    assert pid != my_pid()


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
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        assert cursor.fetchone()[0] == 0
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
