"""A lock of one thread: how its handle notices that it is lost, is acquired again, and is released."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
from django.db import DatabaseError, connection

from django_pglock import Lease, LockError, LockLost, lock, try_lock
from tests.db.locks.sessions import my_pid

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("make", [lock, try_lock, Lease])
def test_a_released_or_never_acquired_lock_is_not_reported_as_lost(make, somebody):
    with make("a") as handle:
        pass
    with pytest.raises(LockLost, match="'a' is not held: it was released"):
        handle.assert_held()
    somebody.holds("busy")
    with pytest.raises(LockLost, match="Lock 'busy' is not held: it was never acquired"):
        try_lock("busy").acquire().assert_held()


def test_a_lost_lock_is_reported_as_lost_afterwards(somebody):
    with pytest.raises(LockLost, match="session has ended"), lock("a") as handle:
        somebody.ends_session(my_pid())
    with pytest.raises(LockLost, match=r"session has ended.*Another session may have held it"):
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


def test_a_handle_notices_that_its_lock_was_freed_by_other_code():
    with pytest.raises(LockLost, match="did not hold"), lock("a"), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_unlock_all()")


def test_the_same_thread_may_take_it_again_and_gives_it_back_in_pairs(somebody):
    with lock("a"):
        with lock("a"):
            pass
        assert not somebody.can_have("a")
    assert somebody.can_have("a")


def test_reentrant_false_refuses_a_second_acquire():
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


def test_a_lock_is_released_when_its_session_is_ended(somebody, eventually):
    with pytest.raises(LockLost), try_lock("a") as handle:
        somebody.ends_session(my_pid())
        eventually(lambda: not _holds(handle))
    assert somebody.can_have("a")


def _holds(handle):
    try:
        handle.assert_held()
    except LockLost:
        return False
    return True


@pytest.mark.parametrize("take", [lock("a"), Lease("a", ttl=5)])
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_handle_cannot_be_copied_or_pickled(take, duplicate):
    """The copy would free the lock when Python deletes the copy."""
    with take as handle:
        with pytest.raises(TypeError, match="'a' cannot be copied or pickled, because its handle owns it"):
            duplicate(handle)
        gc.collect()
        handle.assert_held()
