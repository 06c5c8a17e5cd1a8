"""Connection pools, Django's own and those of other packages: a session that returns to a pool must hold no lock."""

from __future__ import annotations

import copy
import os

import pytest
from django.db import close_old_connections, connection, connections, transaction

from django_pglock import LockLost, lock
from django_pglock.postgres.connections import has_ended
from tests.concurrency.locks.pooling.base import DatabaseWrapper as Pooling
from tests.concurrency.locks.test_handle import locks_held
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def pooled():
    """This thread's connection, reached through a pool of one."""
    connection.close()
    settings, before = connection.settings_dict, copy.deepcopy(connection.settings_dict)
    settings["OPTIONS"]["pool"] = {"min_size": 1, "max_size": 1}
    settings["CONN_MAX_AGE"] = 0
    yield connection
    connection.close()
    connection.close_pool()
    settings.update(before)


def pid_of(connection):
    return execute_sql("SELECT pg_backend_pid()")[0][0]


def test_a_session_is_used_again_while_no_lock_is_held(pooled):
    before = pid_of(pooled)
    with lock("a"):
        assert pid_of(pooled) == before
    pooled.close()
    assert pid_of(pooled) == before
    assert locks_held() == 0


@pytest.mark.parametrize("close", ["close", "end of request"])
def test_closing_under_a_lock_ends_the_session_and_is_noticed(pooled, close, eventually):
    """close() returns the session to the pool, where no code would release the lock."""
    before = pid_of(pooled)
    with pytest.raises(LockLost), lock("a"):
        if close == "close":
            pooled.close()
        else:
            close_old_connections()
        eventually(lambda: locks_held() == 0)
        with lock("a"):
            assert pid_of(pooled) != before
    assert locks_held() == 0


def test_an_unreleased_handle_ends_with_the_request(pooled, eventually):
    kept = lock("forgotten").acquire()
    assert locks_held() == 1
    close_old_connections()
    eventually(lambda: locks_held() == 0)
    assert not kept
    assert "close" not in vars(pooled), "the pool works as before"


@pytest.fixture
def pooling(monkeypatch):
    """This thread's connection, of a backend with a pool of its own."""
    before = connections["default"]
    monkeypatch.setitem(before.settings_dict, "ENGINE", "tests.concurrency.locks.pooling")
    mine = connections["default"] = Pooling(before.settings_dict, alias="default")
    yield mine
    connections["default"] = before
    mine.close()
    while Pooling.idle:
        Pooling.idle.pop().close()


def test_a_pool_of_another_package_gets_no_session_with_a_lock(pooling, eventually):
    with pytest.raises(LockLost), lock("a"):
        pooling.close()
        eventually(lambda: locks_held() == 0)
    with lock("a", timeout=1) as handle:
        handle.assert_held()
    pooling.close()
    assert len(Pooling.idle) == 1, "without a lock the session returns to the pool"


def test_a_handle_is_false_once_its_session_is_back_in_a_pool(pooling):
    kept = lock("kept").acquire()
    with transaction.atomic(), lock("a") as handle:
        pass
    pooling.close()
    assert not kept
    assert not handle
    with transaction.atomic():
        assert not handle, "the session has another user now"


def test_a_forked_child_does_not_use_the_sessions_in_a_pool_of_another_package(pooling):
    pooling.ensure_connection()
    pooling.close()
    child = os.fork()
    if child == 0:
        os._exit(0 if has_ended(Pooling.idle[0]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
