"""The locks and sessions of the servers, as another database session sees them."""

from __future__ import annotations

from typing import Any

import environ
import psycopg

from django_pglock.keys import make_key

LOCKS = """
SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = pg_locks.database
WHERE locktype = 'advisory' AND datname = current_database() AND granted = %(granted)s
  AND classid = %(high)s::bigint::oid AND objid = %(low)s::bigint::oid AND objsubid = 1
"""
LOCKS_OF_SITE = """
SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND application_name = %s
"""
# A coroutine polls at least four times in a second, and the name of the lock is in a comment of its statement.
POLLS = """
SELECT count(*) FROM pg_stat_activity
WHERE strpos(query, %s) > 0 AND pid <> pg_backend_pid() AND query_start > clock_timestamp() - interval '1 second'
"""
SESSIONS_OF_SITE = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"


class Observer:
    """A session that reads the locks of a server, given by its DATABASE_URL, and can take a lock itself."""

    def __init__(self, url: str) -> None:
        settings = environ.Env.db_url_config(url)
        given = {name: settings[key] for name, key in _PARAMETERS.items() if settings.get(key)}
        self._session = psycopg.connect(**given, autocommit=True)
        #: How the session is connected.
        self.info = self._session.info

    def locks(self, name: str) -> int:
        """Count the holders of a lock."""
        return self._count(LOCKS, {**_halves(name), "granted": True})

    def waiters(self, name: str) -> int:
        """Count who waits for a lock."""
        return self._count(LOCKS, {**_halves(name), "granted": False})

    def waits_or_polls(self, name: str) -> bool:
        """Return whether a thread or a coroutine waits for a lock."""
        return self.waiters(name) > 0 or self._count(POLLS, [name]) > 0

    def locks_of(self, site: str) -> int:
        """Count the advisory locks that sessions of a server hold or wait for."""
        return self._count(LOCKS_OF_SITE, [site])

    def sessions_of(self, site: str) -> int:
        """Count the database sessions of a server."""
        return self._count(SESSIONS_OF_SITE, [site])

    def take(self, name: str) -> None:
        """Take a lock that must be free."""
        assert self._count("SELECT pg_try_advisory_lock(%s)::int", [make_key(name).number]), f"{name} is not free"

    def free(self, name: str) -> None:
        """Free a lock that was taken."""
        assert self._count("SELECT pg_advisory_unlock(%s)::int", [make_key(name).number])

    def free_all(self) -> None:
        """Release the locks of a failed test."""
        self._session.execute("SELECT pg_advisory_unlock_all()")

    def close(self) -> None:
        self._session.close()

    def _count(self, statement: str, parameters: Any) -> int:
        row = self._session.execute(statement, parameters).fetchone()
        assert row is not None
        return int(row[0])


_PARAMETERS = {"host": "HOST", "port": "PORT", "dbname": "NAME", "user": "USER", "password": "PASSWORD"}


def _halves(name: str) -> dict[str, int]:
    number = make_key(name).number
    return {"high": (number >> 32) & 0xFFFFFFFF, "low": number & 0xFFFFFFFF}
