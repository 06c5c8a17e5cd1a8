"""The advisory locks of a parent and of a round of upkeep."""

from __future__ import annotations

import pytest
from django.db import connection, transaction

from django_pglock.keys.reserved import WORKER, draw_number
from django_pglock.models import Task
from django_pglock.postgres.connections import has_session_ended
from django_pglock.store.liveness import LOCK_PARENT, TRY_UPKEEP_LOCK, try_upkeep_lock
from tests.sample import tasks
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


def holders(number):
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid = pg_backend_pid() FROM pg_locks WHERE locktype = 'advisory' AND classid = %s::bigint::oid"
            " AND objid::bigint = %s::bigint & 4294967295 AND objsubid = 2",
            [WORKER, number],
        )
        return [is_mine for (is_mine,) in cursor.fetchall()]


def lock_parent(number):
    return execute_sql(LOCK_PARENT, [number])[0][0]


def test_a_session_holds_the_lock_of_a_parent_unless_another_session_has_it(session):
    free, taken = draw_number(), draw_number()
    with session.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s, %s)", [WORKER, taken])
    assert [lock_parent(number) for number in (free, taken)] == [True, False]
    assert [holders(number) for number in (free, taken)] == [[True], [False]]


def test_one_session_holds_the_upkeep_lock_until_its_transaction_ends(session):
    def other_has_it():
        with session.cursor() as cursor:
            cursor.execute(TRY_UPKEEP_LOCK)
            return cursor.fetchone()[0]

    with transaction.atomic():
        assert try_upkeep_lock("default")
        assert not other_has_it()
    session.set_autocommit(False)
    assert other_has_it()
    with transaction.atomic():
        assert not try_upkeep_lock("default")
    session.rollback()
    with transaction.atomic():
        assert try_upkeep_lock("default")


def test_the_settings_of_the_upkeep_lock_end_with_the_transaction():
    shown = "SELECT current_setting('enable_sort'), current_setting('idle_in_transaction_session_timeout')"
    [before] = execute_sql(shown)
    with transaction.atomic():
        try_upkeep_lock("default")
        assert execute_sql(shown) == [("off", "3s")]
    assert execute_sql(shown) == [before]


def test_a_worker_frozen_during_upkeep_does_not_block_the_upkeep_of_others(session, claim, worker, eventually):
    """It holds the lock of the round in an open transaction; the server ends that session after three seconds."""
    tasks.nothing.enqueue()
    claim()
    session.set_autocommit(False)
    with session.cursor() as cursor:
        cursor.execute(TRY_UPKEEP_LOCK)
        assert cursor.fetchone()[0] is True
    worker(queues=["another"])
    eventually(lambda: Task.objects.filter(rescues=1).exists(), why="nobody rescued anything")
    assert has_session_ended(session)
