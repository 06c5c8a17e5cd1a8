"""A lock of one thread: how its handle notices that it is lost, is acquired again, and is released."""

from __future__ import annotations

import os

import pytest
from django.db import DatabaseError, connection

from django_pglock import LockError, LockLost, lock
from tests.db.locks.sessions import my_pid

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_session_that_was_terminated_is_noticed_before_the_end(somebody, eventually):
    with pytest.raises(LockLost), lock("a") as handle:
        handle.assert_held()
        somebody.ends_session(my_pid())
        with pytest.raises(LockLost):
            eventually(lambda: handle.assert_held())
        assert not handle
    assert somebody.can_have("a")
    with lock("a"):
        pass


@pytest.mark.parametrize("scope", ["session", "transaction"])
def test_a_handle_is_false_in_a_forked_child(scope):
    with lock("a", scope=scope) as handle:
        child = os.fork()
        if child == 0:
            os._exit(1 if handle else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        handle.assert_held()


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
