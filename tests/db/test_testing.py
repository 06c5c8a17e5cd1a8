"""The tools for tests of projects."""

from __future__ import annotations

import pytest

from django_pglock import LockNotAvailable, lock
from django_pglock.models import AdvisoryLock
from django_pglock.testing import assert_locked, assert_no_locks, assert_not_locked, hold


@pytest.mark.django_db
def test_hold_takes_the_lock_in_another_session():
    """Also inside the transaction of a TestCase, where this session could take its own lock again."""
    with hold("checkout", 1):
        with pytest.raises(LockNotAvailable), lock("checkout", 1, timeout=0):
            pass
        assert_locked("checkout:1")
        assert [row.name for row in AdvisoryLock.objects.for_name("checkout", 1)] == ["checkout:1"]
        with pytest.raises(AssertionError, match="already"), hold("checkout:1"):
            pass
        with pytest.raises(AssertionError, match="is held"):
            assert_not_locked("checkout:1")
        with pytest.raises(AssertionError, match="1 advisory"):
            assert_no_locks()
    assert_not_locked("checkout", 1)
    with pytest.raises(AssertionError, match="nobody"):
        assert_locked("checkout", 1)


@pytest.mark.django_db(transaction=True)
def test_workers_own_locks_do_not_count(worker):
    worker()
    assert_no_locks()


@pytest.mark.django_db
def test_a_lock_of_a_session_that_came_later_is_seen_within_one_transaction():
    """PostgreSQL keeps a list of the sessions for the rest of a transaction, once one has asked for it."""
    assert_no_locks()
    with hold("later"), pytest.raises(AssertionError, match="1 advisory"):
        assert_no_locks()
