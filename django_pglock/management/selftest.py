"""Tests whether a server, with any pooler or proxy in front of it, really excludes a client while another has a lock.

Poolers, standbys, proxies and other engines with PostgreSQL's protocol accept the statements of locks without an error,
but some of them exclude no other client. So the effect is tested: one client takes something, and another one tries.
Each test uses two new sessions, so that earlier tests have no effect on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
from django.utils.translation import gettext as _
from psycopg import sql
from psycopg.errors import InsufficientPrivilege

from django_pglock.conf import get_settings
from django_pglock.keys import sha256_key
from django_pglock.postgres.sessions import dedicated_connection


def selftest(using: str) -> Iterator[tuple[str, bool | None]]:
    """Yield what locks and claims need, and whether it is so; None: the role has no right to test it."""
    yield _("The server accepts writes."), _tested(using, _writes)
    if get_settings().SCOPE != "transaction":
        yield _("A session lock excludes other clients until it is freed."), _tested(using, _session_locks)
    yield _("A transaction lock excludes other clients until the commit."), _tested(using, _transaction_locks)
    yield _("FOR UPDATE SKIP LOCKED skips the rows that another client has locked."), _tested(using, _rows)


def _tested(using: str, test: Any) -> bool | None:
    connections = [dedicated_connection(using, application_name="django_pglock selftest") for _number in range(2)]
    try:
        for connection in connections:
            connection.ensure_connection()
        return bool(test(*(connection.connection for connection in connections)))
    except InsufficientPrivilege:
        return None
    except psycopg.Error:
        return False
    finally:
        for connection in connections:
            connection.close()


def _value(raw: Any, statement: str | sql.Composed, *values: Any) -> Any:
    row = raw.execute(statement, values or None).fetchone()
    return row[0] if row else None


def _a_key() -> int:
    return sha256_key(f"django_pglock selftest {uuid4()}")


def _writes(first: Any, second: Any) -> bool:
    return not _value(first, "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::bool")


def _session_locks(first: Any, second: Any) -> bool:
    key = _a_key()
    first.execute("SELECT pg_advisory_lock(%s)", [key])
    with second.transaction():
        is_excluded = not _value(second, "SELECT pg_try_advisory_lock(%s)", key)
        # If a pooler has given our session to this transaction, we get another session now.
        is_freed = _value(first, "SELECT pg_advisory_unlock(%s)", key)
    # Behind a pooler the locks may be in any session, and would stay there.
    while any(_value(raw, "SELECT pg_advisory_unlock(%s)", key) for raw in (first, second)):
        pass
    return is_excluded and is_freed


def _transaction_locks(first: Any, second: Any) -> bool:
    key, try_lock = _a_key(), "SELECT pg_try_advisory_xact_lock(%s)"
    with first.transaction(), second.transaction():
        first.execute("SELECT pg_advisory_xact_lock(%s)", [key])
        is_excluded = not _value(second, try_lock, key)
    return is_excluded and _value(second, try_lock, key)


def _rows(first: Any, second: Any) -> bool:
    table = sql.Identifier(f"django_pglock_selftest_{uuid4().hex[:12]}")
    take = sql.SQL("SELECT id FROM {} ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED").format(table)
    first.execute(sql.SQL("CREATE TABLE {} (id) AS VALUES (1), (2)").format(table))
    try:
        with first.transaction(), second.transaction():
            return (_value(first, take), _value(second, take)) == (1, 2)
    finally:
        first.execute(sql.SQL("DROP TABLE {}").format(table))
