"""Hold a lock in another session, and assert which locks are held.

The tools use a session of their own, so they work inside ``TestCase``, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from psycopg import Error as PsycopgError

from django_pglock.conf import get_settings
from django_pglock.keys import make_key, reserved
from django_pglock.locks.base_handle import BaseHandle
from django_pglock.locks.statements import comment
from django_pglock.postgres.connections import connection_for
from django_pglock.postgres.sessions import dedicated_connection

# Without the locks of workers and of their services, and without the locks that the package takes for a moment when a
# task is enqueued: tests of locks are not about these.
COUNT_HELD = """
SELECT count(*) FROM pg_locks AS l JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND a.application_name NOT LIKE 'lockworker%%'
  AND NOT (l.objsubid = 2 AND l.classid::bigint = ANY (%s))
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


@contextmanager
def hold(*parts: Any, shared: bool = False, using: str | None = None) -> Iterator[None]:
    """Hold the lock of this name in another session for the duration of the block, as a second process would.

    ``parts`` are the parts of the name, as for ``lock``; ``shared`` holds the lock in shared mode. Raises
    ``AssertionError`` at once if another session holds the lock, so that the test does not hang.
    """
    key = make_key(*parts)
    suffix = "_shared" if shared else ""
    with _session(using) as connection:
        # With the comment that shows the name of the lock in the admin and in holders().
        if not _ask(connection, f"{comment((key,))}SELECT pg_try_advisory_lock{suffix}(%s)", key.number):
            raise AssertionError(f"Lock {key.name!r} is held by another session already.")
        try:
            yield
        finally:
            # The end of the session releases the lock, too, but a moment later. If the session was terminated, the lock
            # is free already. Without Django's cursor, because pytest-django may have blocked the database by now.
            with suppress(PsycopgError):
                connection.connection.execute(f"SELECT pg_advisory_unlock{suffix}(%s)", (key.number,))


def assert_locked(*parts: Any, using: str | None = None) -> None:
    """Raise ``AssertionError`` unless a session holds the lock of this name."""
    if _is_free(parts, using):
        raise AssertionError(f"No session holds the lock {make_key(*parts).name!r}.")


def assert_not_locked(*parts: Any, using: str | None = None) -> None:
    """Raise ``AssertionError`` if a session holds the lock of this name."""
    if not _is_free(parts, using):
        raise AssertionError(f"Lock {make_key(*parts).name!r} is held.")


def assert_no_locks(*, using: str | None = None) -> None:
    """Raise ``AssertionError`` if an advisory lock is held or awaited, except the package's own locks."""
    connection = connection_for(using or get_settings().USING)
    # Otherwise PostgreSQL returns the same list of sessions for a whole transaction, such as that of a TestCase.
    _ask(connection, "SELECT pg_stat_clear_snapshot()")
    if left := _ask(connection, COUNT_HELD, list(reserved.ALL)):
        raise AssertionError(f"{left} advisory locks are held or awaited.")


@contextmanager
def locks_disabled() -> Iterator[None]:
    """Grant every lock at once in this block, in all threads, without a statement. Leases are not affected.

    For tests that count statements or have no database. Such tests do not show that a lock excludes other sessions.
    """
    before, BaseHandle.is_disabled = BaseHandle.is_disabled, True
    try:
        yield
    finally:
        BaseHandle.is_disabled = before


def _is_free(parts: tuple[Any, ...], using: str | None) -> bool:
    with _session(using) as connection:
        return bool(_ask(connection, "SELECT pg_try_advisory_xact_lock(%s)", make_key(*parts).number))


@contextmanager
def _session(using: str | None) -> Iterator[Any]:
    connection = dedicated_connection(using or get_settings().USING, application_name="django_pglock.testing")
    try:
        yield connection
    finally:
        connection.close()


def _ask(connection: Any, statement: str, *values: Any) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        return cursor.fetchone()[0]
