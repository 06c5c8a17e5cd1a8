"""Time limits of waits and of holders: one limit for all locks, and the limits of the caller as they were."""

from __future__ import annotations

import threading
import time

import pytest
from django.db import OperationalError, connection, transaction
from psycopg.errors import LockNotAvailable as ServerTimeout

from django_pglock import LockNotAvailable, lock, lock_all
from django_pglock.keys import make_key
from django_pglock.locks import statements
from django_pglock.locks.request import Request
from django_pglock.locks.statements import Busy, acquire_session_locks, restore_limit
from tests.conftest import NEVER
from tests.db.locks.sessions import Somebody, setting, statements_of
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("in_transaction", [False, True])
def test_the_callers_own_lock_timeout_is_as_it_was(in_transaction):
    execute_sql("SET lock_timeout = '7s'")
    if in_transaction:
        with transaction.atomic():
            with lock("a", timeout=1):
                assert setting("lock_timeout") == "7s"
            with lock("a"):
                assert setting("lock_timeout") == "7s"
    else:
        with lock("a", timeout=1):
            assert setting("lock_timeout") == "7s"
    connection.close()


def test_a_short_statement_timeout_does_not_cut_a_longer_wait_short(somebody):
    execute_sql("SET statement_timeout = '50ms'")
    somebody.holds("a")
    with pytest.raises(LockNotAvailable), lock("a", timeout=0.2):
        pass
    assert setting("statement_timeout") == "50ms"
    connection.close()


@pytest.mark.parametrize("in_transaction", [False, True])
def test_the_timeout_of_lock_all_limits_the_sum_of_the_waits(somebody, in_transaction):
    """PostgreSQL's lock_timeout begins anew for each lock."""
    others = [Somebody() for _ in range(4)]
    for number, other in enumerate(others):
        other.ask("SELECT pg_advisory_lock(%s)", number)
    # Each lock becomes free after most of the limit has passed, so that only the sum exceeds it.
    try:
        execute_sql("SET lock_timeout = '7s'")
        freeing = _free_one_after_another(others, 0.2)
        outer = transaction.atomic() if in_transaction else lock("unrelated")
        with outer, pytest.raises(LockNotAvailable), lock_all(0, 1, 2, 3, timeout=0.3):
            pass
        assert setting("lock_timeout") == "7s"
        freeing.join(60)
    finally:
        connection.close()
        for other in others:
            other.leaves()


def test_a_wait_for_several_locks_ends_although_the_clock_is_put_back_meanwhile(somebody, monkeypatch):
    """As if the statement had begun an hour later."""
    wait, hour = statements.wait_for_all, "(statement_timestamp() + interval '1 hour')"
    monkeypatch.setattr(
        statements,
        "wait_for_all",
        lambda *request, **options: wait(*request, **options).replace("statement_timestamp()", hour),
    )
    somebody.holds("a")
    with transaction.atomic(), pytest.raises(LockNotAvailable), connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL statement_timeout = '{NEVER}s'")
        lock_all("a", "b", timeout=0.1).acquire()


def _free_one_after_another(others, pause):
    def free():
        while not others[0].ask("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"):
            time.sleep(0.01)
        for other in others:
            time.sleep(pause)
            other.leaves()

    thread = threading.Thread(target=free, daemon=True)
    thread.start()
    return thread


LIMITS = ("idle_session_timeout", "idle_in_transaction_session_timeout")


@pytest.mark.parametrize("timeout", [None, 0, 5])
@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_max_hold_is_in_force_while_the_lock_is_held_and_then_as_it_was(timeout, names):
    execute_sql("SET idle_session_timeout = '7min'")

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


@pytest.mark.parametrize("value", ["0", "-1", "1500", "7s", "500ms", "1min", "3h", "1d", "20us"])
def test_a_limit_is_restored_in_the_format_in_which_the_server_has_given_it(value):
    assert restore_limit(LIMITS[0], value) == f"set_config('{LIMITS[0]}', '{value}', false)"


@pytest.mark.parametrize("value", ["", "7 s", "7s'", "1w", "s", "7s\n", "7s', false), pg_sleep('60"])
def test_a_limit_that_is_no_time_does_not_get_into_a_statement(value):
    with pytest.raises(ValueError, match="is no time"):
        restore_limit(LIMITS[0], value)


def test_only_the_timeout_of_the_request_means_that_the_lock_is_busy():
    """Without a timeout of the request, it is that of the role. Django's error has that of psycopg as its cause."""
    django = OperationalError()
    django.__cause__ = ServerTimeout()
    for error, timeout, raised in [
        (django, 1.0, Busy),
        (ServerTimeout(), 1.0, Busy),
        (django, None, OperationalError),
        (ServerTimeout(), None, ServerTimeout),
        (OperationalError(), 1.0, OperationalError),
    ]:
        steps = acquire_session_locks(Request((make_key("a"),), timeout))
        next(steps)
        with pytest.raises(raised):
            steps.throw(error)
