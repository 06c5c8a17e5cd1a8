"""Semaphores: a handle holds one slot, and a waiter gets the first slot that becomes free."""

from __future__ import annotations

import time

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_pglock import LockError, LockNotAvailable, lock, semaphore
from django_pglock.keys import make_key
from tests.db.locks.sessions import advisory_rows

pytestmark = pytest.mark.django_db(transaction=True)


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


def test_one_holder_never_has_a_slot_twice():
    """PostgreSQL grants a session a lock that it holds already, so the count would be wrong."""
    with semaphore("s", limit=2, timeout=0) as one, semaphore("s", limit=2, timeout=0) as two:
        assert one.key != two.key
        with pytest.raises(LockError, match="already holds all slots"), semaphore("s", limit=2):
            pass


def test_a_transaction_may_get_the_same_slot_again(somebody):
    with transaction.atomic():
        keys = {semaphore("s", limit=2, timeout=timeout).acquire().key for timeout in (0, 5, None)}
        assert advisory_rows() == 1
        with semaphore("s", limit=2, scope="transaction") as slot:
            keys.add(slot.key)
        assert len(keys) == 1
    assert all(somebody.can_have(f"s#{number}") for number in (1, 2))


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, 1001])
def test_an_invalid_limit_of_a_semaphore_is_refused(limit):
    with pytest.raises(ValueError, match="limit"):
        semaphore("s", limit=limit)
