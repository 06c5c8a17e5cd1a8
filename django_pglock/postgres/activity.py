"""The state, in ``pg_stat_activity``, of sessions that this process waits for.

A statement may take hours. Only the server knows whether it still executes the statement. So it is queried in another
session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from django_pglock.postgres.connections import backend_pid

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

#: The server's process id of a session. Behind a pooler it differs from the process id that libpq knows.
OWN_SESSION = "SELECT pg_backend_pid(), pg_is_in_recovery()"
#: The login role may see its sessions, also if Django assumes another role.
AS_LOGIN_ROLE = "SET ROLE NONE"
#: ``state`` is NULL for sessions that the role may not see, and 'disabled' if track_activities is off.
#: https://www.postgresql.org/docs/current/monitoring-stats.html#MONITORING-PG-STAT-ACTIVITY-VIEW
SESSIONS = """
SELECT pid, state, coalesce(wait_event IN ('ClientRead', 'ClientWrite'), false),
    coalesce(extract(epoch FROM clock_timestamp() - state_change), 0)::float
FROM pg_stat_activity WHERE pid = ANY(%s)
"""
#: Seconds for which the oldest statement of this database has run; infinity where the role may not see a statement.
#: ``backend_type`` is NULL, too, where the role may not see a session.
OLDEST_STATEMENT = """
SELECT max(CASE WHEN state = 'active' THEN extract(epoch FROM clock_timestamp() - query_start)::float
                ELSE 'infinity' END)
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid()
  AND (backend_type = 'client backend' OR backend_type IS NULL AND usename = session_user)
  AND (state IS NULL OR state IN ('active', 'disabled', 'fastpath function call'))
"""


@dataclass(frozen=True)
class Activity:
    """The activity of a session: ``state`` as in pg_stat_activity, and ``since`` in seconds."""

    state: str | None
    waits_for_client: bool
    since: float


@dataclass(frozen=True)
class ServerView:
    """The answer of a server. ``sessions``: by process id; None behind a pooler, where libpq has the pooler's ids."""

    is_standby: bool
    sessions: dict[int, Activity] | None
    #: Behind a pooler: seconds for which the oldest statement of the database has run.
    oldest_statement: float = 0.0


def view_of_server(connection: DatabaseWrapper, pids: Sequence[int]) -> ServerView:
    """Query the server of ``connection``, a session of our own, for sessions by process id. Raises Django's errors.

    Behind a pooler no role is set, because the next client of the session would get it.
    """
    with connection.cursor() as cursor:
        cursor.execute(OWN_SESSION)
        pid, is_standby = cursor.fetchone()
        if pid != backend_pid(connection):
            cursor.execute(OLDEST_STATEMENT)
            return ServerView(is_standby, None, cursor.fetchone()[0] or 0.0)
        cursor.execute(AS_LOGIN_ROLE)
        cursor.execute(SESSIONS, (list(pids),))
        return ServerView(is_standby, {pid: Activity(*columns) for pid, *columns in cursor.fetchall()})
