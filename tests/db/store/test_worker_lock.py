"""The advisory lock of a worker."""

from __future__ import annotations

import pytest
from django.db import connection

from django_pglock.keys.reserved import WORKER, draw_number
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store import worker_lock
from django_pglock.store.worker_lock import lock_worker, unlock_worker

pytestmark = pytest.mark.django_db(transaction=True)


def holders(number):
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid = pg_backend_pid() FROM pg_locks WHERE locktype = 'advisory' AND classid = %s::bigint::oid"
            " AND objid::bigint = %s::bigint & 4294967295 AND objsubid = 2",
            [WORKER, number],
        )
        return [is_mine for (is_mine,) in cursor.fetchall()]


def test_a_session_holds_the_lock_until_it_releases_it():
    number = draw_number()
    assert lock_worker("default", number) is True
    assert holders(number) == [True]
    unlock_worker("default", number)
    assert holders(number) == []


def test_the_lock_of_another_session_is_not_taken():
    number, other = draw_number(), dedicated_connection("default")
    try:
        with other.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(%s, %s)", [WORKER, number])
        assert lock_worker("default", number) is False
        assert holders(number) == [False]
    finally:
        other.close()


def test_behind_a_pooler_a_worker_takes_no_session_lock(monkeypatch):
    """The session would keep the lock, and other clients use this session."""
    monkeypatch.setattr(worker_lock, "backend_pid", lambda connection: -1)
    number = draw_number()
    assert lock_worker("default", number) is None
    assert holders(number) == []
