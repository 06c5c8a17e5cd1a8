"""What users write, corner by corner: scopes and timeouts."""

from __future__ import annotations

import cProfile
import pstats
from datetime import timedelta

import pytest
from django.db import connection, connections, transaction
from django.test import TestCase, override_settings
from django.test.utils import CaptureQueriesContext

from django_pglock import LockNotAvailable, LockScopeError, lock, try_lock
from django_pglock.keys import make_key
from django_pglock.postgres.message import is_plain_django
from tests.db.locks.sessions import advisory_rows
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


# Scope


def test_auto_outside_a_transaction_is_a_session_lock(somebody):
    with lock("a") as handle:
        assert (handle.scope, bool(handle)) == ("session", True)
        assert not somebody.can_have("a")
    assert not handle
    assert somebody.can_have("a")


def test_auto_inside_atomic_lasts_to_the_commit(somebody):
    """If the lock were released before the commit, the next holder would read old data."""
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


def test_acquire_of_a_transaction_lock_without_a_transaction_is_refused():
    with pytest.raises(LockScopeError, match="released immediately"):
        lock("a", scope="transaction").acquire()


@override_settings(DJANGO_PGLOCK={"SCOPE": "transaction"})
def test_a_lock_without_a_scope_uses_the_scope_of_the_settings():
    with lock("a") as handle:
        assert handle.scope == "transaction"


class InsideTestCase(TestCase):
    """``TestCase`` wraps each test in a transaction; code under test must behave as in production."""

    def test_the_transaction_of_a_test_case_does_not_count_for_the_scope_auto(self):
        with lock("a") as handle:
            self.assertEqual(handle.scope, "session")
        with transaction.atomic(), lock("a") as handle:
            self.assertEqual(handle.scope, "transaction")


def test_set_rollback_of_the_caller_is_honoured():
    """A hidden savepoint would discard the rollback that the error handler of DRF requests."""
    with transaction.atomic(), lock("a"):
        Effect.objects.create(name="undone")
        transaction.set_rollback(True)
    assert not Effect.objects.exists()


# Busy, and how long


@pytest.mark.parametrize("in_transaction", [False, True])
@pytest.mark.parametrize("timeout", [0, 0.05, timedelta(milliseconds=50)])
def test_a_busy_lock_raises_lock_not_available_and_leaves_the_connection_usable(somebody, in_transaction, timeout):
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


# Cost


def test_acquiring_and_releasing_a_lock_makes_at_most_200_function_calls():
    """Calls in Python and in C. Seconds would depend on the load of the machine; the least number of calls does not."""

    def use():
        with lock("report"):
            pass

    def calls() -> int:
        profile = cProfile.Profile()
        profile.runcall(use)
        return pstats.Stats(profile).total_calls

    use()
    assert is_plain_django(connections["default"])
    assert min(calls() for _ in range(5)) <= 200
