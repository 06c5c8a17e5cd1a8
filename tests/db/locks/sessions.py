"""Sessions for tests of locks: another session, the session of the test, and those of leases."""

from __future__ import annotations

from contextlib import suppress

from django.db import DatabaseError, connection
from django.test.utils import CaptureQueriesContext

from django_pglock.keys import make_key
from django_pglock.postgres.sessions import dedicated_connection
from tests.sql import execute_sql


class Somebody:
    """Another session, which holds and reads locks."""

    def __init__(self) -> None:
        self.connection = dedicated_connection("default")

    def ask(self, sql, *params):
        with self.connection.cursor() as cursor:
            cursor.execute(sql, params)
            return cursor.fetchone()[0]

    def holds(self, name):
        self.ask("SELECT pg_advisory_lock(%s)", make_key(name).number)

    def can_have(self, name):
        """Return whether the lock is free for others, and leave it as it was."""
        return self.ask("SELECT pg_try_advisory_xact_lock(%s)", make_key(name).number)

    def leaves(self):
        """Release all locks and close the session. After a mere close, they would be released a moment later."""
        with suppress(DatabaseError):
            self.connection.set_autocommit(True)
            self.ask("SELECT pg_advisory_unlock_all()")
        self.connection.close()

    def ends_session(self, pid):
        self.ask("SELECT pg_terminate_backend(%s)", pid)


def my_pid():
    return execute_sql("SELECT pg_backend_pid()")[0][0]


def setting(name):
    return execute_sql("SELECT current_setting(%s)", [name])[0][0]


def advisory_rows():
    return execute_sql("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()")[0][0]


def statements_of(function):
    with CaptureQueriesContext(connection) as queries:
        function()
    return len(queries)


def execute(sql):
    execute_sql(sql)


def sessions_of_leases():
    [row] = execute_sql(
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%django_pglock_lease%' AND pid <> pg_backend_pid()"
    )
    return row[0]
