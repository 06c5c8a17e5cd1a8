"""The running statements of the database, as pg_stat_activity shows them."""

from __future__ import annotations

import math
import threading

import pytest
from django.db import connection

from django_pglock.postgres.activity import OLDEST_STATEMENT
from django_pglock.postgres.pending_statements import pending_statements
from django_pglock.postgres.sessions import dedicated_connection

pytestmark = pytest.mark.django_db(transaction=True)


def test_the_age_of_a_statement_that_the_role_may_not_see_is_infinite(eventually):
    other = dedicated_connection("default")
    other.ensure_connection()
    raw = other.connection
    sleeping = threading.Thread(target=raw.execute, args=("SELECT pg_sleep(2)",))
    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE sees_nothing")
        sleeping.start()
        try:
            mine = eventually(lambda: [wait for wait in pending_statements() if wait.raw is raw])
            assert mine[0].statement is not None
            cursor.execute("SET ROLE sees_nothing")
            cursor.execute(OLDEST_STATEMENT)
            assert cursor.fetchone()[0] == math.inf
        finally:
            sleeping.join()
            cursor.execute("RESET ROLE; DROP ROLE sees_nothing")
            other.close()
