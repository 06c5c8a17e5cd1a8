"""The advisory lock of a parent."""

from __future__ import annotations

import pytest
from django.db import connection

from django_pglock.keys.reserved import WORKER, draw_number
from django_pglock.store.liveness import LOCK_PARENT
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
