"""The rows of waiters for results."""

from __future__ import annotations

from contextlib import closing

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_pglock.models import Waiter
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store.result_waiters import ended, write_waiters
from tests.db.store.waiting import results_of

pytestmark = pytest.mark.django_db(transaction=True)


def test_one_statement_looks_up_the_tasks_of_a_thousand_waiters():
    ids = [int(result.id) for result in results_of(1000)]
    with CaptureQueriesContext(connection) as queries:
        assert ended("default", [*ids, 10**15]) == [(10**15, False)]
        noted = write_waiters("default", ids, instead_of=[])
        assert sorted(noted) == sorted(ids)
        assert write_waiters("default", [], instead_of=list(noted.values())) == {}
    assert len(queries) == 3
    assert not Waiter.objects.exists()


def test_a_row_in_deletion_causes_no_wait():
    [result] = results_of(1)
    [earlier] = write_waiters("default", [int(result.id)], instead_of=[]).values()
    with closing(dedicated_connection("default")) as other, other.cursor() as cursor, transaction.atomic():
        cursor.execute("BEGIN")
        cursor.execute("SELECT FROM django_pglock_waiter WHERE id = %s FOR UPDATE", [earlier])
        with connection.cursor() as mine:
            mine.execute("SET LOCAL lock_timeout = '1s'")
        assert list(write_waiters("default", [int(result.id)], instead_of=[earlier])) == [int(result.id)]
    assert Waiter.objects.filter(pk=earlier).exists()
