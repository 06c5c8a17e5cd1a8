"""Tools for the tests of projects that use locks: hold a lock as somebody else would, and see what is left.

They use a session of their own, so they work inside ``TestCase`` as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from psycopg import Error as PsycopgError

from django_pglock.conf import get_settings
from django_pglock.keys import make_key, reserved
from django_pglock.locks.base_handle import BaseHandle
from django_pglock.postgres.connections import connection_for
from django_pglock.postgres.sessions import dedicated_connection

# The locks of workers and of their services are no business of a test about locks, nor are those that the package takes
# for a moment when a task is enqueued.
LEFT = """
SELECT count(*) FROM pg_locks AS l JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND a.application_name NOT LIKE 'lockworker%%'
  AND NOT (l.objsubid = 2 AND l.classid::bigint = ANY (%s))
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


@contextmanager
def hold(*parts: Any, shared: bool = False, using: str | None = None) -> Iterator[None]:
    """Hold the lock of this name in another session, as a second process would.

    Raises ``AssertionError`` at once if somebody has it already, instead of letting the test hang.
    """
    key = make_key(*parts)
    connection = dedicated_connection(using or get_settings().USING, application_name="django_pglock.testing")
    suffix = "_shared" if shared else ""
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT pg_try_advisory_lock{suffix}(%s)", (key.number,))
            if not cursor.fetchone()[0]:
                raise AssertionError(f"Lock {key.name!r} is held by somebody else already.")
        try:
            yield
        finally:
            # The end of the session frees it as well, but only a moment later; a session that was ended has done so.
            # Below Django, because a fixture may come here when the test may ask the database nothing any more.
            with suppress(PsycopgError):
                connection.connection.execute(f"SELECT pg_advisory_unlock{suffix}(%s)", (key.number,))
    finally:
        connection.close()


def assert_locked(*parts: Any, using: str | None = None) -> None:
    """Fail unless somebody holds the lock of this name."""
    if _is_free(parts, using):
        raise AssertionError(f"Lock {make_key(*parts).name!r} is held by nobody.")


def assert_not_locked(*parts: Any, using: str | None = None) -> None:
    """Fail if somebody holds the lock of this name."""
    if not _is_free(parts, using):
        raise AssertionError(f"Lock {make_key(*parts).name!r} is held.")


def assert_no_locks(*, using: str | None = None) -> None:
    """Fail if any advisory lock is held or awaited in this database, those of workers and of the package apart."""
    with connection_for(using or get_settings().USING).cursor() as cursor:
        # Within one transaction, as that of a TestCase, PostgreSQL tells of the sessions that were there at first.
        cursor.execute("SELECT pg_stat_clear_snapshot()")
        cursor.execute(LEFT, (list(reserved.ALL),))
        left = cursor.fetchone()[0]
    if left:
        raise AssertionError(f"{left} advisory locks are held or awaited.")


@contextmanager
def locks_disabled() -> Iterator[None]:
    """Let everybody have every lock in this block, in all threads, and ask PostgreSQL nothing. Leases stay.

    For tests that count statements or have no database; what a lock is for, they do not show.
    """
    before, BaseHandle.is_disabled = BaseHandle.is_disabled, True
    try:
        yield
    finally:
        BaseHandle.is_disabled = before


def _is_free(parts: tuple[Any, ...], using: str | None) -> bool:
    connection = dedicated_connection(using or get_settings().USING, application_name="django_pglock.testing")
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", (make_key(*parts).number,))
            return bool(cursor.fetchone()[0])
    finally:
        connection.close()
