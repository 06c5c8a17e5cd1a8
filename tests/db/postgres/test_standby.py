"""Whether a session can write, as its server reports. Tests with a standby: ``qa/servers/test_moved_address.py``."""

from __future__ import annotations

import pytest
from django.db import DatabaseError, connection, transaction
from psycopg.pq import TransactionStatus

from django_pglock.postgres.connections import access_of, end_session, is_on_standby, transaction_status
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def own_session():
    yield
    end_session(connection)


def execute(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)


def test_a_primary_is_no_standby():
    connection.close()
    assert access_of(connection) == (False, False)
    assert not is_on_standby(connection)


def test_a_read_only_session_does_not_count_as_a_session_of_a_standby():
    execute("SET default_transaction_read_only = on")
    assert access_of(connection) == (False, True)


def test_a_session_that_ends_during_the_standby_query_counts_as_one_of_a_standby():
    with pytest.raises(DatabaseError):
        execute("SELECT pg_terminate_backend(pg_backend_pid())")
    assert access_of(connection) == (True, True)


def test_the_standby_query_does_not_end_the_transaction_of_the_caller():
    execute("BEGIN")
    with pytest.raises(DatabaseError):
        execute("SELECT 1 / 0")
    assert access_of(connection) == (False, False)
    assert transaction_status(connection) == TransactionStatus.INERROR


def test_the_standby_query_works_in_a_block_that_must_be_rolled_back():
    with transaction.atomic():
        Effect.objects.create(name="undone")
        transaction.set_rollback(True)
        assert access_of(connection) == (False, False)
    assert not Effect.objects.exists()


def test_without_autocommit_an_aborted_transaction_is_rolled_back_first(monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "AUTOCOMMIT", False)
    connection.set_autocommit(False)
    execute("SET TRANSACTION READ ONLY")
    with pytest.raises(DatabaseError):
        Effect.objects.create(name="refused")
    assert access_of(connection) == (False, False)
