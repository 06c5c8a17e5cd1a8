"""Several locks at once: all or none, in one statement, in one order."""

from __future__ import annotations

import random

import pytest
from django.db import transaction
from django.test import TestCase

from django_pglock import LockKeyError, LockNotAvailable, lock, lock_all
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
