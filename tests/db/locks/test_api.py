"""The contract of locks, corner by corner."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial

import pytest
from django.db import OperationalError, connection, transaction
from django.db.utils import DatabaseError
from django.test import TestCase, override_settings
from django.test.utils import CaptureQueriesContext

from django_pglock import (
    Lease,
    LockError,
    LockKeyError,
    LockLost,
    LockNotAvailable,
    LockScopeError,
    leader,
    lock,
    lock_all,
    lock_view,
    semaphore,
    signals,
    try_lock,
)
from django_pglock.errors import ConfigurationError
from django_pglock.keys import make_key
from django_pglock.postgres.sessions import dedicated_connection
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


class Somebody:
    """Another session, with which to hold locks and look at them."""

    def __init__(self) -> None:
        self.connection = dedicated_connection("default")

    def ask(self, sql, *params):
        with self.connection.cursor() as cursor:
            cursor.execute(sql, params)
            return cursor.fetchone()[0]

    def holds(self, name):
        self.ask("SELECT pg_advisory_lock(%s)", make_key(name).number)

    def can_have(self, name):
        """Say whether the lock is free for others, and leave it as it was."""
        return self.ask("SELECT pg_try_advisory_xact_lock(%s)", make_key(name).number)

    def leaves(self):
        """Free all locks and go. Without the first, they would be free only a moment after the second."""
        with suppress(DatabaseError):
            self.connection.set_autocommit(True)
            self.ask("SELECT pg_advisory_unlock_all()")
        self.connection.close()

    def ends_session(self, pid):
        self.ask("SELECT pg_terminate_backend(%s)", pid)


@pytest.fixture
def somebody() -> Iterator[Somebody]:
    other = Somebody()
    yield other
    other.leaves()


def my_pid():
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return cursor.fetchone()[0]


def setting(name):
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting(%s)", [name])
        return cursor.fetchone()[0]


def advisory_rows():
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()")
        return cursor.fetchone()[0]


# Scope


def test_auto_outside_a_transaction_is_a_session_lock(somebody):
    with lock("a") as handle:
        assert (handle.scope, bool(handle)) == ("session", True)
        assert not somebody.can_have("a")
    assert not handle
    assert somebody.can_have("a")


def test_auto_inside_atomic_lasts_to_the_commit(somebody):
    """Freed before the commit, the next holder would read old data."""
    with transaction.atomic():
        with lock("a") as handle:
            assert handle.scope == "transaction"
        assert not somebody.can_have("a")
    assert somebody.can_have("a")


def test_a_session_lock_inside_atomic_is_refused(somebody):
    with transaction.atomic():
        with pytest.raises(LockScopeError, match="outside the block"), lock("a", scope="session"):
            pass
        assert somebody.can_have("a")
        assert Effect.objects.count() == 0, "the transaction is still usable"


def test_a_transaction_lock_outside_opens_its_own_transaction(somebody):
    with lock("a", scope="transaction"):
        assert connection.in_atomic_block
        Effect.objects.create(name="inside")
        assert not somebody.can_have("a")
    assert not connection.in_atomic_block
    assert somebody.can_have("a")
    with pytest.raises(ZeroDivisionError), lock("a", scope="transaction"):
        Effect.objects.create(name="undone")
        1 / 0  # noqa: B018
    assert list(Effect.objects.values_list("name", flat=True)) == ["inside"]


def test_acquire_of_a_transaction_lock_without_a_transaction_is_refused():
    with pytest.raises(LockScopeError, match="gone at once"):
        lock("a", scope="transaction").acquire()


@override_settings(DJANGO_PGLOCK={"SCOPE": "transaction"})
def test_the_settings_scope_is_used_where_none_is_named():
    with lock("a") as handle:
        assert handle.scope == "transaction"


class InsideTestCase(TestCase):
    """``TestCase`` wraps each test in a transaction; code under test must behave as in production."""

    def test_its_own_transaction_does_not_count(self):
        with lock("a") as handle:
            self.assertEqual(handle.scope, "session")
        with transaction.atomic(), lock("a") as handle:
            self.assertEqual(handle.scope, "transaction")

    def test_a_timeout_leaves_its_transaction_usable(self):
        other = Somebody()
        try:
            other.holds("a")
            with self.assertRaises(LockNotAvailable), lock("a", timeout=0.01):
                pass
            self.assertEqual(Effect.objects.count(), 0)
        finally:
            other.leaves()


@pytest.mark.parametrize("scope", ["auto", "transaction"])
def test_a_snapshot_that_is_older_than_the_lock_is_refused(scope):
    """At REPEATABLE READ one would wait for the lock and then read what was there before its last holder committed."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        with pytest.raises(LockScopeError, match="stale_ok"), lock("a", scope=scope):
            pass
        with lock("a", scope=scope, stale_ok=True):
            pass
    with lock("a") as handle:
        assert handle.scope == "session", "outside a transaction the lock comes before the snapshot"


def test_a_rollback_to_a_savepoint_before_the_lock_frees_it(somebody):
    with transaction.atomic():
        with pytest.raises(ZeroDivisionError), transaction.atomic(), lock("a"):
            1 / 0  # noqa: B018
        assert somebody.can_have("a")
        with transaction.atomic(), lock("b"):
            pass
        assert not somebody.can_have("b")


def test_set_rollback_of_the_caller_is_honoured():
    """A hidden savepoint would swallow what DRF's error handler asks for."""
    with transaction.atomic(), lock("a"):
        Effect.objects.create(name="undone")
        transaction.set_rollback(True)
    assert not Effect.objects.exists()


# Busy, and how long


@pytest.mark.parametrize("in_transaction", [False, True])
@pytest.mark.parametrize("timeout", [0, 0.05, timedelta(milliseconds=50)])
def test_busy_is_its_own_exception_and_leaves_everything_usable(somebody, in_transaction, timeout):
    somebody.holds("a")
    with CaptureQueriesContext(connection):
        outer = transaction.atomic() if in_transaction else lock("unrelated")
        with outer:
            with pytest.raises(LockNotAvailable) as caught, lock("a", timeout=timeout):
                pytest.fail("the body ran without the lock")
            assert (caught.value.name, caught.value.key) == ("a", make_key("a").number)
            assert isinstance(caught.value, TimeoutError)
            Effect.objects.create(name="still works")
    assert Effect.objects.exists()
    assert advisory_rows() == 0


def test_try_lock_leaves_the_decision_to_the_body(somebody):
    with try_lock("a") as held:
        assert held
    somebody.holds("a")
    with try_lock("a") as held:
        assert not held
    assert not try_lock("a").acquire()


@pytest.mark.parametrize("in_transaction", [False, True])
def test_the_callers_own_lock_timeout_is_as_it_was(in_transaction):
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '7s'")
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
    with connection.cursor() as cursor:
        cursor.execute("SET statement_timeout = '50ms'")
    somebody.holds("a")
    with pytest.raises(LockNotAvailable), lock("a", timeout=0.2):
        pass
    assert setting("statement_timeout") == "50ms"
    connection.close()


def test_errors_that_are_not_busy_pass_through_and_leave_nothing_held(somebody):
    """A wait without limit is cut by the operator's statement_timeout: that is not "somebody else has it"."""
    somebody.holds("a")
    with connection.cursor() as cursor:
        cursor.execute("SET statement_timeout = '50ms'")
    with pytest.raises(OperationalError, match="statement timeout"), lock("a"):
        pass
    assert advisory_rows() == 0
    connection.close()


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), True, "1", timedelta(days=100)])
def test_a_timeout_that_is_none_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout"):
        lock("a", timeout=timeout)


# Round trips


def statements_of(function):
    with CaptureQueriesContext(connection) as queries:
        function()
    return len(queries)


@pytest.mark.parametrize("timeout", [None, 0, 5])
def test_one_statement_acquires_and_one_frees(timeout):
    def use():
        with lock("a", timeout=timeout):
            pass

    assert statements_of(use) == 2


@pytest.mark.parametrize("timeout", [None, 0, 5])
def test_in_a_transaction_one_statement_acquires_and_none_frees(timeout):
    with transaction.atomic():

        def use():
            with lock("a", timeout=timeout):
                pass

        assert statements_of(use) == 1


# Lost


@pytest.mark.parametrize("make", [lock, try_lock, Lease])
def test_what_was_given_back_or_never_taken_is_not_called_lost(make, somebody):
    with make("a") as handle:
        pass
    with pytest.raises(LockLost, match="'a' is not held: it was released"):
        handle.assert_held()
    somebody.holds("busy")
    with pytest.raises(LockLost, match="Lock 'busy' is not held: it was never acquired"):
        try_lock("busy").acquire().assert_held()


def test_what_was_lost_is_called_so_afterwards(somebody):
    with pytest.raises(LockLost, match="session has ended"), lock("a") as handle:
        somebody.ends_session(my_pid())
    with pytest.raises(LockLost, match=r"session has ended.*Others may have held it"):
        handle.assert_held()


def test_a_connection_that_was_closed_in_the_body_is_noticed(somebody, eventually):
    with pytest.raises(LockLost, match="closed"), lock("a"):
        connection.close()
    # The server frees the lock a moment later; the next test may want it.
    eventually(lambda: somebody.can_have("a"))


def test_a_session_that_was_terminated_is_noticed_before_the_end(somebody, eventually):
    with pytest.raises(LockLost), lock("a") as handle:
        handle.assert_held()
        somebody.ends_session(my_pid())
        with pytest.raises(LockLost):
            eventually(lambda: handle.assert_held())
    assert somebody.can_have("a")
    with lock("a"):
        pass


def test_the_bodys_own_exception_is_kept_when_the_lock_was_lost(somebody):
    with pytest.raises(ZeroDivisionError), lock("a"):
        somebody.ends_session(my_pid())
        1 / 0  # noqa: B018


def test_somebody_who_frees_our_lock_is_noticed():
    with pytest.raises(LockLost, match="did not hold"), lock("a"), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_unlock_all()")


# Again, and elsewhere


def test_the_same_thread_may_take_it_again_and_gives_it_back_in_pairs(somebody):
    with lock("a"):
        with lock("a"):
            pass
        assert not somebody.can_have("a")
    assert somebody.can_have("a")


def test_reentry_can_be_refused():
    with lock("a"), pytest.raises(LockError, match="already"), lock("a", reentrant=False):
        pass


def test_a_handle_is_released_once_and_by_its_own_thread(in_threads):
    handle = lock("a").acquire()
    with pytest.raises(LockError, match="another thread"):
        in_threads(lambda _: handle.release(), 1)
    handle.release()
    with pytest.raises(LockError, match="not held"):
        handle.release()


def test_an_error_in_the_body_frees_the_lock(somebody):
    with pytest.raises(DatabaseError), lock("a"), connection.cursor() as cursor:
        cursor.execute("SELECT 1 / 0")
    assert somebody.can_have("a")


@pytest.mark.parametrize(
    "name", ["quote ' and \" and %s %(x)s", "*/ SELECT 1; /*", "new\nline; -- x", "\u202eright to left", "x" * 10_000]
)
def test_any_name_is_only_a_name(somebody, name):
    with lock(name, timeout=1):
        assert not somebody.can_have(name)
    assert somebody.can_have(name)


def test_waiters_show_the_name(somebody, in_threads, eventually):
    somebody.holds("visible")
    shown = (
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '/* django_pglock:%% visible */%%'"
        " AND wait_event = 'advisory'"
    )

    def look_or_wait(number):
        if number == 0:
            with lock("visible", timeout=300):
                return
        try:
            eventually(lambda: somebody.ask(shown), why="no name is shown")
        finally:
            somebody.leaves()

    in_threads(look_or_wait, 2)


# Decorator


def test_a_template_binds_the_functions_parameters(somebody):
    seen = []

    @lock("sync:{shop_id}:{kind}")
    def sync(shop_id, kind="full"):
        """Its docstring."""
        seen.append(somebody.can_have(f"sync:{shop_id}:{kind}"))
        return shop_id

    assert sync(5) == 5
    assert sync(shop_id="a:b", kind="x") == "a:b"
    assert seen == [False, True], "the colon was escaped, so the plain name stays free"
    assert (sync.__name__, sync.__doc__) == ("sync", "Its docstring.")


def test_without_a_name_the_functions_path_is_the_name(somebody):
    class Shop:
        @lock()
        def close(self):
            return somebody.can_have(f"{__name__}.{Shop.close.__qualname__}")

    assert Shop().close() is False


def test_what_a_busy_call_answers_can_be_chosen(somebody):
    somebody.holds("a")
    assert lock("a", timeout=0, on_busy="skip")(lambda: "ran")() is None
    assert lock("a", timeout=0, on_busy=lambda busy, value: (busy.name, value))(lambda value: "ran")(7) == ("a", 7)
    with pytest.raises(LockNotAvailable):
        lock("a", timeout=0)(lambda: "ran")()


@pytest.mark.parametrize("make", [lock, lock_all, partial(semaphore, limit=2), Lease, partial(leader, ttl=5)])
def test_an_answer_that_cannot_be_is_refused_before_anybody_is_busy(make):
    for on_busy in ("Skip", None, 5):
        with pytest.raises(ValueError, match=f"on_busy is {on_busy!r}; give 'raise', 'skip' or a function"):
            make("a", on_busy=on_busy)


@pytest.mark.parametrize("make", [lock, try_lock, lock_all, partial(semaphore, limit=2), lock_view])
def test_a_scope_that_does_not_exist_is_refused_before_it_is_used(make):
    for scope in ("Session", "", 5):
        with pytest.raises(LockScopeError, match=f"There is no scope {scope!r}; use 'auto', 'session', 'transaction'"):
            make("a", scope=scope)


def test_what_outlives_its_call_is_refused_at_decoration():
    async def async_generator():
        yield

    def generator():
        yield

    for function in (async_generator, generator):
        with pytest.raises(ConfigurationError, match="before its work is done"):
            lock("a")(function)
    with pytest.raises(LockKeyError, match="no parameter"):
        lock("a:{nobody}")(lambda x: x)


def test_signals_tell_of_taking_giving_back_and_being_busy(somebody):
    heard = []
    receivers = {
        name: lambda sender, handle, name=name, **kwargs: heard.append((name, handle.name))
        for name in ("lock_acquired", "lock_released", "lock_busy")
    }
    for name, receiver in receivers.items():
        getattr(signals, name).connect(receiver)
    try:
        with lock("a"):
            pass
        somebody.holds("b")
        with try_lock("b"):
            pass
    finally:
        for name, receiver in receivers.items():
            getattr(signals, name).disconnect(receiver)
    assert heard == [("lock_acquired", "a"), ("lock_released", "a"), ("lock_busy", "b")]


def test_a_lock_costs_few_calls():
    """In Python and in C. Seconds would depend on what else the machine does; the least number of calls does not."""

    def use():
        with lock("report"):
            pass

    def calls() -> int:
        profile = cProfile.Profile()
        profile.runcall(use)
        return pstats.Stats(profile).total_calls

    use()
    assert min(calls() for _ in range(5)) <= 200
