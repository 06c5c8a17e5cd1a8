"""Hooks in a Django connection for the locks of its session: names in statements, savepoints, pools.

One execute wrapper is installed when the connection is opened, and is never removed. It adds a comment with the names
of the held locks to each statement, and reports savepoints to the session's records. It is below all other wrappers,
which may be added and removed at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from django.db.backends.signals import connection_created

from django_pglock.locks.session_locks import SessionLocks
from django_pglock.postgres.message import OWN_WRAPPERS, has_only_own_wrappers, is_djangos_function

# Each lock asks for the same function, that of its backend.
_is_djangos = lru_cache(maxsize=64)(is_djangos_function)

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

_ATTRIBUTE = "_django_pglock_locks"


def session_locks_of(connection: DatabaseWrapper) -> SessionLocks:
    """Return the records of the locks that the session of a Django connection holds."""
    locks: SessionLocks | None = connection.__dict__.get(_ATTRIBUTE)
    if locks is None:
        locks = connection.__dict__[_ATTRIBUTE] = SessionLocks()
        install_wrapper(connection)
    elif locks.pending:
        locks.free_pending()
    return locks


def holds_locks(connection: DatabaseWrapper) -> bool:
    """Return whether the session of a Django connection holds locks of this package, or may hold them."""
    locks: SessionLocks | None = connection.__dict__.get(_ATTRIBUTE)
    return locks is not None and bool(locks.pending or locks.records(connection))


def keep_out_of_pool(connection: DatabaseWrapper) -> None:
    """Ensure that a session does not return to a pool with a lock. The next user would then hold the lock.

    The backends of other packages may have a pool of their own, from which they take their sessions.
    """
    if connection.settings_dict["OPTIONS"].get("pool") or not _is_djangos(type(connection).get_new_connection):
        connection.close = partial(_close_pooled, connection)  # type: ignore[method-assign]


def _close_pooled(connection: DatabaseWrapper) -> None:
    locks = session_locks_of(connection)
    raw: Any = connection.connection
    if raw is not None and any(record.scope == "session" for record in locks.records(connection)):
        # The pool notices that the session is closed, and opens another. The close() of a pool's own class of
        # connections would only return the session to the pool.
        raw.pgconn.finish()
    connection.__dict__.pop("close", None)
    connection.close()


def install_wrapper(connection: Any, **kwargs: Any) -> None:
    """Install the execute wrapper, below all others and once."""
    if connection.vendor == "postgresql" and _wrapper not in connection.execute_wrappers:
        connection.execute_wrappers.insert(0, _wrapper)


def _wrapper(execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
    connection = context["connection"]
    locks: SessionLocks | None = connection.__dict__.get(_ATTRIBUTE)
    if not locks:
        return execute(sql, params, many, context)
    if locks.pending:
        locks.free_pending()
    locks.drop_ended(connection)
    try:
        result = execute(_with_names(sql, locks.comment(), connection), params, many, context)
    finally:
        if locks.pending:
            locks.free_pending()
    if locks:
        locks.track_statement(sql if isinstance(sql, str) else sql.as_string(connection.connection))
    return result


def _with_names(sql: Any, names: str, connection: Any) -> Any:
    """Add the names of held locks to a statement, because pg_stat_activity shows a session's last statement.

    If the statement already begins with a comment, that comment stays first, because it may be a hint for the planner.
    If there are other wrappers, the names are at the end, because a wrapper may check how a statement begins.
    """
    if not names or not isinstance(sql, str) or sql.lstrip().startswith("/*"):
        return sql
    return names + sql if has_only_own_wrappers(connection) else f"{sql} {names}"


OWN_WRAPPERS.insert(0, _wrapper)
connection_created.connect(install_wrapper, dispatch_uid="django_pglock.locks.connection_hooks")
