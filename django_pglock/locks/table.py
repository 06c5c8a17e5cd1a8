"""PostgreSQL's other locks: LOCK TABLE, and a time limit for waits for any lock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from django.db import Error as DatabaseFailure
from django.db import models, router
from django.db.models.base import ModelBase
from psycopg.errors import LockNotAvailable as ServerTimeout

from django_pglock.conf import get_settings
from django_pglock.errors import LockNotAvailable, LockScopeError
from django_pglock.locks.request import Timeout, to_seconds
from django_pglock.postgres.connections import connection_for, transaction_block

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

__all__ = ["lock_table", "lock_timeout"]

#: https://www.postgresql.org/docs/current/explicit-locking.html#LOCKING-TABLES
MODES = (
    *("ACCESS SHARE", "ROW SHARE", "ROW EXCLUSIVE", "SHARE UPDATE EXCLUSIVE"),
    *("SHARE", "SHARE ROW EXCLUSIVE", "EXCLUSIVE", "ACCESS EXCLUSIVE"),
)
SET_LOCK_TIMEOUT = """
SELECT set_config('lock_timeout', %s, true), before
FROM (SELECT current_setting('lock_timeout') AS before OFFSET 0) AS b
"""


def lock_table(
    *tables: type[models.Model], mode: str = "ACCESS EXCLUSIVE", timeout: Timeout = None, using: str | None = None
) -> None:
    """Lock whole tables to the end of the transaction: ``lock_table(Order, mode="SHARE ROW EXCLUSIVE")``.

    - ``tables``: models; their tables are locked in one statement, in this order.
    - ``mode``: one of PostgreSQL's table lock modes; default the strongest. ``SHARE ROW EXCLUSIVE`` lets others read,
      but neither write nor take this lock.
    - ``timeout``: seconds or a timedelta; None (default) waits without limit, 0 does not wait.
    - ``using``: database alias; default the one to which the router sends writes of the first model.

    Raises ``LockScopeError`` outside ``atomic()``, ``LockNotAvailable`` if another session has a table locked for
    longer than the timeout (the transaction stays usable), and ``ValueError`` for an invalid model or mode.
    """
    if not tables:
        raise ValueError("lock_table() needs at least one model.")
    for table in tables:
        if not isinstance(table, ModelBase):
            raise ValueError(f"lock_table() was given {table!r}, which is not a model.")  # noqa: TRY004 - as for the mode
    mode = mode.upper().replace("_", " ")
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; use one of {', '.join(MODES)}.")
    connection = connection_for(using or router.db_for_write(tables[0]))
    names = ", ".join(connection.ops.quote_name(table._meta.db_table) for table in tables)
    if not connection.in_atomic_block:
        raise LockScopeError(f"A lock on {names} outside atomic() would be released immediately.", name=names)
    seconds = to_seconds(timeout)
    statement = f"LOCK TABLE {names} IN {mode} MODE{' NOWAIT' if seconds == 0 else ''}"
    if seconds is None:
        _execute(connection, statement)
    else:
        _lock_within(connection, statement, names, seconds)


def _lock_within(connection: DatabaseWrapper, statement: str, names: str, seconds: float) -> None:
    try:
        # The savepoint of ``lock_timeout()`` keeps the transaction usable. Otherwise a timeout would abort the
        # transaction.
        with lock_timeout(seconds or None, using=connection.alias):
            _execute(connection, statement)
    except DatabaseFailure as error:
        if not isinstance(error.__cause__, ServerTimeout):
            raise
        waited = f" within {seconds:g} s" if seconds else ""
        raise LockNotAvailable(
            f"The lock on {names} was not granted{waited}.", name=names, timeout=seconds, using=connection.alias
        ) from error


@contextmanager
def lock_timeout(timeout: Timeout, *, using: str | None = None) -> Iterator[None]:
    """Limit how long statements in this block wait for any lock: ``with lock_timeout(2): order.save()``.

    - ``timeout``: seconds or a timedelta; None switches the present limit off.
    - ``using``: database alias; default from the setting ``USING``. Other databases are not affected.

    The limit is ``lock_timeout`` of the transaction: outside of ``atomic()`` the block becomes a transaction. At its
    end the previous limit is restored. A statement that waits for too long raises Django's ``OperationalError``
    (SQLSTATE 55P03) and, like each error, aborts the transaction up to its last savepoint. Locks of this package have
    their own ``timeout``.

    Raises ``ValueError`` for an invalid time, and for 0, which means "no limit" in PostgreSQL.
    """
    seconds = to_seconds(timeout)
    if seconds == 0:
        raise ValueError("timeout is 0; give seconds above zero, or None for no limit.")
    alias = using or get_settings().USING
    connection = connection_for(alias)
    # Inside a transaction it is a savepoint, so that an error that is caught outside the block also restores the limit.
    with transaction_block(alias):
        before = _set(connection, "0" if seconds is None else str(max(1, round(seconds * 1000))))
        yield
        # After an error, the rollback to the savepoint, or of the transaction, restores the limit.
        if not connection.needs_rollback:
            _set(connection, before)


def _set(connection: DatabaseWrapper, value: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute(SET_LOCK_TIMEOUT, (value,))
        before: str = cursor.fetchone()[1]
        return before


def _execute(connection: DatabaseWrapper, statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)
