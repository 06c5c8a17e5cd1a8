"""Whether a session leads to a standby, or may only read.

From PostgreSQL 14 on, a server reports ``in_hot_standby`` to each session, and libpq keeps the last report. A pooler
such as PgBouncer passes on what the first server behind it has reported, also when another server has taken over. So
the report alone proves nothing, and the server is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import Error as DatabaseFailure
from psycopg.pq import TransactionStatus

from django_pglock.postgres.connections import has_session_ended, transaction_status

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

READ_ACCESS = "SELECT pg_is_in_recovery(), current_setting('transaction_read_only')::boolean"


class Access(NamedTuple):
    """What a session may do: whether its server is a standby, and whether its transactions can only read."""

    is_standby: bool
    is_read_only: bool


def access_of(connection: DatabaseWrapper) -> Access:
    """Ask the server what this session may do. A session that is closed is opened.

    A session that is lost counts as one on a standby: in a failover, sessions to both servers end.
    """
    if transaction_status(connection) == TransactionStatus.INERROR:
        if connection.settings_dict["AUTOCOMMIT"] or connection.in_atomic_block:
            # No question can be asked, and the transaction is not ours to end.
            return Access(*2 * [reports_standby(connection)])
        connection.rollback()
    try:
        with connection.cursor() as cursor:
            cursor.execute(READ_ACCESS)
            return Access(*cursor.fetchone())
    except DatabaseFailure:
        is_lost = connection.connection is None or has_session_ended(connection)
        return Access(is_lost, is_lost)


def is_on_standby(connection: DatabaseWrapper) -> bool:
    """Return whether the server of this open session is a standby. It is asked only if libpq has such a report."""
    return reports_standby(connection) and access_of(connection).is_standby


def reports_standby(connection: DatabaseWrapper) -> bool:
    """Return whether libpq has the report that the server of this session is a standby."""
    raw: Any = connection.connection
    return raw is not None and not raw.closed and raw.pgconn.parameter_status(b"in_hot_standby") == b"on"
