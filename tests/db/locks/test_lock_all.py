"""Several locks at once: all or none, in one statement, in one order."""

from __future__ import annotations

import random
import threading
import time

import pytest
from django.db import OperationalError, connection, transaction
from django.test import TestCase
from django.test.utils import CaptureQueriesContext

from django_pglock import LockError, LockKeyError, LockNotAvailable, lock, lock_all, semaphore
from django_pglock.keys import make_key
from tests.db.locks.sessions import Somebody, advisory_rows, setting, statements_of
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)
NAMES = ["a", ("order", 5), 7]


@pytest.mark.parametrize("in_transaction", [False, True])
@pytest.mark.parametrize("timeout", [None, 0, 5])
@pytest.mark.parametrize("count", [2, 100])
def test_lock_all_takes_all_locks_with_one_statement(in_transaction, timeout, count):
    names = [f"name {number}" for number in range(count)]

    def use():
        with lock_all(*names, timeout=timeout) as handle:
            assert sorted(handle.keys) == list(handle.keys)
            assert len(handle.keys) == count

    if in_transaction:
        with transaction.atomic():
            assert statements_of(use) == 1
            assert advisory_rows() == count
    else:
        assert statements_of(use) == 2
    assert advisory_rows() == 0


def test_each_name_is_what_lock_takes_and_counts_once(somebody):
    with lock_all(*NAMES, "order:5") as handle:
        assert set(handle.keys) == {make_key("a").number, make_key("order", 5).number, 7}
        assert not any(somebody.can_have(name) for name in ("a", "order:5", 7))
    assert all(somebody.can_have(name) for name in ("a", "order:5", 7))


@pytest.mark.parametrize("in_transaction", [False, True])
@pytest.mark.parametrize("timeout", [0, 0.05])
@pytest.mark.parametrize("busy", ["a", "b", "c"])
def test_lock_all_takes_no_lock_if_one_is_busy(somebody, in_transaction, timeout, busy):
    """Whichever lock is busy, the other ones are free afterwards, and the own lock is held as before."""
    somebody.holds(busy)
    with transaction.atomic() if in_transaction else lock("unrelated"), lock("mine"):
        before = advisory_rows()
        with pytest.raises(LockNotAvailable) as caught, lock_all("a", "b", "c", "mine", timeout=timeout):
            pytest.fail("the body ran without the locks")
        assert advisory_rows() == before
        assert not somebody.can_have("mine")
        assert busy in caught.value.args[0]
        assert [row.key for row in caught.value.holders() if row.key == make_key(busy).number]
        assert Effect.objects.count() == 0, "the connection is usable"
    assert all(somebody.can_have(name) for name in ("a", "b", "c", "mine") if name != busy)
    assert advisory_rows() == 0


@pytest.mark.parametrize("in_transaction", [False, True])
def test_the_timeout_of_lock_all_limits_the_sum_of_the_waits(somebody, in_transaction):
    """PostgreSQL's lock_timeout begins anew for each lock."""
    others = [Somebody() for _ in range(4)]
    for number, other in enumerate(others):
        other.ask("SELECT pg_advisory_lock(%s)", number)
    # Each lock becomes free after most of the limit has passed, so that only the sum exceeds it.
    try:
        with connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = '7s'")
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


class InsideTestCase(TestCase):
    def test_session_scope_and_its_errors_leave_the_tests_transaction_usable(self):
        other = Somebody()
        try:
            with lock_all("a", "b", timeout=1) as handle:
                self.assertEqual(handle.scope, "session")
                self.assertFalse(other.can_have("b"))
            self.assertTrue(other.can_have("b"))
            other.holds("b")
            for timeout in (0, 0.01):
                with self.assertRaises(LockNotAvailable), lock_all("a", "b", timeout=timeout):
                    pass
                self.assertTrue(other.can_have("a"))
            with lock("c"), self.assertRaises(LockNotAvailable), lock_all("a", "b", "c", timeout=0.01):
                pass
            self.assertEqual(setting("lock_timeout"), "0")
        finally:
            other.leaves()


def test_an_error_in_the_middle_leaves_none(somebody):
    somebody.holds("b")
    with connection.cursor() as cursor:
        cursor.execute("SET statement_timeout = '50ms'")
    with pytest.raises(OperationalError, match="statement timeout"), lock_all("a", "b", "c"):
        pass
    assert advisory_rows() == 0
    connection.close()


def test_a_decorators_names_are_templates_each_of_them(somebody):
    @lock_all("account:{source}", "account:{target}", "audit")
    def transfer(source, target):
        return [somebody.can_have(name) for name in ("account:1", "account:2", "audit", "account:3")]

    assert transfer(1, target=2) == [False, False, False, True]
    for wrong in (lock_all("a", ("order", "{source}")), lock("order", "{source}")):
        with pytest.raises(LockKeyError, match="as one template"):
            wrong(lambda source: None)


def test_keys_that_cannot_be_locked_together_are_refused():
    with pytest.raises(LockKeyError, match="0 names"):
        lock_all()
    with pytest.raises(LockKeyError, match="1001 names"):
        lock_all(*range(1001))
    with pytest.raises(LockKeyError, match="None"):
        lock_all("a", None)


def test_lock_all_does_not_deadlock_with_names_in_different_orders(in_threads):
    """If the locks were taken in the order of the arguments, a deadlock would occur within moments."""
    names = ["a", "b", "c", "d"]

    def work(number):
        chance = random.Random(number)
        for _ in range(40):
            chance.shuffle(names_here := names.copy())
            with transaction.atomic() if number % 2 else lock("own", number), lock_all(*names_here):
                pass

    in_threads(work, 6)
    assert advisory_rows() == 0


# Semaphore


@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_semaphore_admits_no_more_holders_than_its_limit(in_threads, in_transaction):
    inside, most = [], []

    def work(number):
        for _ in range(10):
            outer = transaction.atomic() if in_transaction else lock("own", number)
            with outer, semaphore("render", limit=3, timeout=60) as slot:
                assert slot.name == "render"
                inside.append(number)
                most.append(len(inside))
                time.sleep(0.002)
                inside.remove(number)

    in_threads(work, 8)
    assert 1 < max(most) <= 3
    assert advisory_rows() == 0


@pytest.mark.parametrize("timeout", [0, 0.05, 0.25])
def test_a_full_semaphore_is_busy(somebody, timeout):
    somebody.holds("s#1")
    somebody.holds("s#2")
    began = time.monotonic()
    with pytest.raises(LockNotAvailable, match="'s'"), semaphore("s", limit=2, timeout=timeout):
        pass
    assert time.monotonic() - began >= timeout
    with semaphore("s", limit=3, timeout=0) as slot:
        assert slot.key == make_key("s#3").number
    assert advisory_rows() == 0


def test_a_semaphore_takes_a_free_slot_with_one_statement(somebody):
    somebody.holds("s#1")

    def use():
        with semaphore("s", limit=2, timeout=60):
            assert advisory_rows() == 1

    with CaptureQueriesContext(connection) as queries:
        use()
    assert len(queries) == 3, "take, the question of this test, free"


def test_a_waiter_for_one_slot_notices_another_free_slot(somebody, in_threads):
    somebody.holds("s#1")
    other = Somebody()
    other.holds("s#2")

    def work(number):
        if number == 0:
            time.sleep(0.05)
            other.leaves()
            return None
        with semaphore("s", limit=2, timeout=60) as slot:
            return slot.key

    assert in_threads(work, 2)[1] == make_key("s#2").number


def test_one_holder_never_has_a_slot_twice():
    """PostgreSQL grants a session a lock that it holds already, so the count would be wrong."""
    with semaphore("s", limit=2, timeout=0) as one, semaphore("s", limit=2, timeout=0) as two:
        assert one.key != two.key
        with pytest.raises(LockError, match="already holds all slots"), semaphore("s", limit=2):
            pass


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, 1001])
def test_an_invalid_limit_of_a_semaphore_is_refused(limit):
    with pytest.raises(ValueError, match="limit"):
        semaphore("s", limit=limit)
