"""Locks on whole tables, and a limit on all waits for locks."""

from __future__ import annotations

import pytest
from django.db import OperationalError, connection, transaction

from django_pglock import LockNotAvailable, LockScopeError, lock_table, lock_timeout
from tests.db.locks.sessions import setting, statements_of
from tests.sample.models import Effect
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


def table_locks():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT mode FROM pg_locks WHERE pid = pg_backend_pid() AND relation = %s::regclass",
            [Effect._meta.db_table],
        )
        return {mode for (mode,) in cursor.fetchall()}


def occupy(somebody):
    somebody.connection.set_autocommit(False)
    with somebody.connection.cursor() as cursor:
        cursor.execute(f"LOCK TABLE {Effect._meta.db_table} IN SHARE MODE")


@pytest.mark.parametrize(("mode", "name"), [("SHARE ROW EXCLUSIVE", "ShareRowExclusiveLock"), ("share", "ShareLock")])
def test_a_table_lock_lasts_until_the_end_of_the_transaction(mode, name):
    with transaction.atomic():
        assert statements_of(lambda: lock_table(Effect, mode=mode)) == 1
        assert name in table_locks()
    assert table_locks() == set()


def test_a_table_lock_outside_a_transaction_is_refused():
    with pytest.raises(LockScopeError, match="released immediately"):
        lock_table(Effect)


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_busy_leaves_the_transaction_usable(somebody, timeout):
    occupy(somebody)
    with transaction.atomic():
        with pytest.raises(LockNotAvailable) as caught:
            lock_table(Effect, timeout=timeout)
        assert caught.value.name == '"sample_effect"'
        assert caught.value.holders() == []
        assert Effect.objects.count() == 0
        assert setting("lock_timeout") == "0"
    somebody.connection.rollback()


def test_a_mode_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="ACCESS EXCLUSIVE"):
        lock_table(Effect, mode="exclusive; DROP TABLE x")
    with pytest.raises(ValueError, match="at least one model"):
        lock_table()
    for table in ("sample.Effect", Effect(), None):
        with pytest.raises(ValueError, match=f"was given {table!r}, which is not a model"):
            lock_table(Effect, table)


def test_a_limit_on_waits_is_in_force_in_the_block_and_then_as_it_was():
    with transaction.atomic():
        execute_sql("SET LOCAL lock_timeout = '7s'")
        with lock_timeout(2):
            assert setting("lock_timeout") == "2s"
            with lock_timeout(None):
                assert setting("lock_timeout") == "0"
            assert setting("lock_timeout") == "2s"
        assert setting("lock_timeout") == "7s"
        with pytest.raises(ZeroDivisionError), lock_timeout(2):
            1 / 0  # noqa: B018
        assert setting("lock_timeout") == "7s"
    assert setting("lock_timeout") == "0"


def test_after_a_begin_of_ones_own_the_limit_ends_with_the_block():
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        Effect.objects.create(name="a")
        with lock_timeout(2):
            assert setting("lock_timeout") == "2s"
        assert setting("lock_timeout") == "0"
        cursor.execute("ROLLBACK")
    assert not Effect.objects.exists()


def test_lock_timeout_limits_the_waits_of_statements_in_its_block(somebody):
    occupy(somebody)
    with pytest.raises(OperationalError, match="lock timeout"), lock_timeout(0.05):
        Effect.objects.create(name="a")
    somebody.connection.rollback()
    assert setting("lock_timeout") == "0"
    with lock_timeout(1):
        Effect.objects.create(name="a")
    assert Effect.objects.count() == 1


@pytest.mark.parametrize("timeout", [0, -1, "1"])
def test_an_invalid_lock_timeout_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout"), lock_timeout(timeout):
        pass
