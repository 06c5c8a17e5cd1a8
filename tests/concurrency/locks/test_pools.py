"""Django's own connection pool: a session that returns to the pool must hold no lock."""

from __future__ import annotations

import copy

import pytest
from django.db import close_old_connections, connection

from django_pglock import LockLost, lock
from tests.concurrency.locks.test_handle import locks_held

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
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return cursor.fetchone()[0]


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
