"""Tests whether a server, with any pooler or proxy in front of it, really excludes a client while another has a lock.

Poolers, standbys, proxies and other engines with PostgreSQL's protocol accept the statements of locks without an error,
but some of them exclude no other client. So the effect is tested: one client takes a lock, and another one tries. Each
check uses two new sessions, so that earlier checks have no effect on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import psycopg
from django.utils.translation import gettext as _
from psycopg import sql
from psycopg.errors import InsufficientPrivilege, LockNotAvailable

from django_pglock.conf import get_settings
from django_pglock.keys import sha256_key
from django_pglock.postgres.connections import shut_down_socket
from django_pglock.postgres.sessions import dedicated_connection

#: Seconds for the answers in one check. Only a server that does not answer at all takes this long.
TIMEOUT = 5.0
#: Limits by which the server ends a session, or the transaction of a lock, while the program works.
LIMITS = "idle_session_timeout", "idle_in_transaction_session_timeout", "transaction_timeout", "statement_timeout"

Answer = tuple[bool | None, str]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    ``is_ok`` is None if the check was not possible. ``is_needed``: if this is not ok, locks or claims exclude no other
    client.
    """

    question: str
    is_ok: bool | None
    text: str
    is_needed: bool


def selftest(using: str) -> Iterator[Finding]:
    """Do each check and yield its finding. Raises Django's ``OperationalError`` if no connection is possible."""
    with dedicated_connection(using).temporary_connection():
        pass
    for question, check in QUESTIONS.items():
        is_ok, text = _checked(using, check)
        yield Finding(question, is_ok, text, question in _needed())


def _needed() -> set[str]:
    needed = {"writes", "transaction_locks", "rows"}
    return needed if get_settings().SCOPE == "transaction" else needed | {"session_locks"}


def _checked(using: str, check: Callable[[Any, Any], Answer]) -> Answer:
    """Do a check in two new sessions. If it takes too long, they are ended."""
    connections = [dedicated_connection(using, application_name="django_pglock selftest") for _ in range(2)]
    is_over = threading.Event()

    def end() -> None:
        is_over.set()
        for connection in connections:
            shut_down_socket(connection)

    guard = threading.Timer(TIMEOUT, end)
    try:
        for connection in connections:
            connection.ensure_connection()
        guard.start()
        return check(*(connection.connection for connection in connections))
    except InsufficientPrivilege as error:
        return None, str(error).strip()
    except psycopg.Error as error:
        has_taken_too_long = guard.finished.is_set()
        return False, _("There was no answer within %d seconds.") % TIMEOUT if has_taken_too_long else str(
            error
        ).strip()
    finally:
        guard.cancel()
        for connection in connections:
            connection.close()


def _value(raw: Any, statement: str | sql.Composed, *values: Any) -> Any:
    row = raw.execute(statement, values or None).fetchone()
    return row[0] if row else None


def _a_key() -> int:
    return sha256_key(f"django_pglock selftest {uuid4()}")


def _writes(first: Any, second: Any) -> Answer:
    if _value(first, "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::bool"):
        return False, _("The server is a standby, or read-only. A lock here excludes no client of the primary.")
    return True, _("The server accepts writes.")


def _sessions(first: Any, second: Any) -> Answer:
    mine = _value(first, "SELECT pg_backend_pid()")
    with second.transaction():
        # If the pooler has given our session to this transaction, we get another session now.
        theirs = _value(second, "SELECT pg_backend_pid()")
        now_mine = _value(first, "SELECT pg_backend_pid()")
    if theirs == mine or now_mine != mine:
        return False, _("A pooler gives the session of a client to others after each transaction.")
    return True, _("Each client keeps its session.")


def _session_locks(first: Any, second: Any) -> Answer:
    key = _a_key()
    first.execute("SELECT pg_advisory_lock(%s)", [key])
    is_excluded = not _value(second, "SELECT pg_try_advisory_lock(%s)", key)
    is_freed = _value(first, "SELECT pg_advisory_unlock(%s)", key)
    is_free = _value(second, "SELECT pg_try_advisory_lock(%s)", key)
    # Behind a pooler the locks may be in any session, and would stay there.
    while any(_value(raw, "SELECT pg_advisory_unlock(%s)", key) for raw in (first, second)):
        pass
    if is_excluded and is_freed and is_free:
        return True, _("A session lock excludes other clients until it is freed.")
    return False, _("A session lock does not exclude other clients, or cannot be freed.")


def _transaction_locks(first: Any, second: Any) -> Answer:
    key, try_lock = _a_key(), "SELECT pg_try_advisory_xact_lock(%s)"
    with first.transaction(), second.transaction():
        first.execute("SELECT pg_advisory_xact_lock(%s)", [key])
        is_excluded = not _value(second, try_lock, key)
    if is_excluded and _value(second, try_lock, key):
        return True, _("A transaction lock excludes other clients until the commit.")
    return False, _("A transaction lock does not exclude other clients until the commit.")


def _rows(first: Any, second: Any) -> Answer:
    table = sql.Identifier(f"django_pglock_selftest_{uuid4().hex[:12]}")
    take = sql.SQL("SELECT id FROM {} ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED").format(table)
    first.execute(sql.SQL("CREATE TABLE {} (id) AS VALUES (1), (2)").format(table))
    try:
        with first.transaction(), second.transaction():
            taken = _value(first, take), _value(second, take)
    finally:
        first.execute(sql.SQL("DROP TABLE {}").format(table))
    if taken == (1, 2):
        return True, _("FOR UPDATE SKIP LOCKED skips the rows that another client has locked.")
    return False, _("FOR UPDATE SKIP LOCKED gives one row to two clients. Two workers could run one task.")


def _lock_timeout(first: Any, second: Any) -> Answer:
    key = _a_key()
    with first.transaction():
        first.execute("SELECT pg_advisory_xact_lock(%s)", [key])
        try:
            with second.transaction():
                second.execute("SET LOCAL lock_timeout = '100ms'")
                second.execute("SELECT pg_advisory_xact_lock(%s)", [key])
        except LockNotAvailable:
            return True, _("lock_timeout ends the wait for a lock.")
    return False, _("lock_timeout does not end the wait for a lock.")


def _notifications(first: Any, second: Any) -> Answer:
    channel = f"django_pglock_selftest_{uuid4().hex[:12]}"
    first.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
    second.execute("SELECT pg_notify(%s, '')", [channel])
    # A pooler drops notifications without an error.
    if any(note.channel == channel for note in first.notifies(timeout=TIMEOUT / 2, stop_after=1)):
        return True, _("A notification reaches the clients that listen.")
    return False, _("A notification does not arrive. Workers poll.")


def _limits(first: Any, second: Any) -> Answer:
    rows = first.execute("SELECT name, setting FROM pg_settings WHERE name = ANY (%s)", [list(LIMITS)]).fetchall()
    limits = ", ".join(f"{name} = {setting} ms" for name, setting in sorted(rows) if setting != "0")
    if limits:
        return False, _("The server limits sessions: %s. A lock ends with its session.") % limits
    return True, _("The server does not limit how long a session is idle or a statement takes.")


#: The checks in their order. The names are those in the JSON output.
QUESTIONS: dict[str, Callable[[Any, Any], Answer]] = {
    "writes": _writes,
    "sessions": _sessions,
    "session_locks": _session_locks,
    "transaction_locks": _transaction_locks,
    "rows": _rows,
    "lock_timeout": _lock_timeout,
    "notifications": _notifications,
    "limits": _limits,
}
