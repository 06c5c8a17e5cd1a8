"""The statements that take and free advisory locks, as text without parameters.

Keys and times are ints of ours, and the name stands in a comment from which everything that could end it is taken.
Without parameters several statements travel in one message, so that each acquire is one round trip.
"""

from __future__ import annotations

import re

from django_pglock.conf import get_settings
from django_pglock.keys import Key

SAVEPOINT = "django_pglock_wait"
LONGEST_NAME = 200
_NOT_IN_COMMENTS = re.compile(r"[\x00-\x1f\x7f]|\*(?=/)|/(?=\*)")


def comment(key: Key) -> str:
    """Return the comment that names the lock in pg_stat_activity; nested or unfinished comments cannot arise."""
    if not get_settings().LOCK_COMMENTS:
        return ""
    return f"/* django_pglock:{_NOT_IN_COMMENTS.sub('?', key.name[:LONGEST_NAME])} */ "


def _suffix(shared: bool) -> str:
    return "_shared" if shared else ""


def try_session(key: Key, *, shared: bool) -> str:
    """Take a session lock if it is free; answers whether."""
    return f"{comment(key)}SELECT pg_try_advisory_lock{_suffix(shared)}({key.number})"


def try_transaction(key: Key, *, shared: bool) -> str:
    """Take a transaction lock if it is free; answers whether."""
    return f"{comment(key)}SELECT pg_try_advisory_xact_lock{_suffix(shared)}({key.number})"


def wait_session(key: Key, *, shared: bool, milliseconds: int | None) -> str:
    """Wait for a session lock, in autocommit.

    The two statements of one message share an implicit transaction, so the settings are back when it ends. The first
    one also lifts the role's statement_timeout, which would otherwise cut a longer wait short; a wait without limit
    leaves it in force, as the net that the operator has spread.
    """
    limits = f"set_config('lock_timeout', '{milliseconds or 0}', true)"
    if milliseconds is not None:
        limits += ", set_config('statement_timeout', '0', true)"
    return f"{comment(key)}SELECT {limits};SELECT pg_advisory_lock{_suffix(shared)}({key.number})"


def wait_transaction(key: Key, *, shared: bool, milliseconds: int | None) -> str:
    """Wait for a transaction lock inside a transaction, and leave the caller's lock_timeout as it was.

    One statement: the inner row remembers the setting, changes it and takes the lock, in this order; the outer one
    puts it back. OFFSET 0 keeps the planner from merging the two. With a limit a savepoint surrounds it, because a
    timeout would abort the transaction; the lock survives its release.
    """
    statement = (
        "SELECT set_config('lock_timeout', before, true) FROM ("
        "SELECT current_setting('lock_timeout') AS before, "
        f"set_config('lock_timeout', '{milliseconds or 0}', true), "
        f"pg_advisory_xact_lock{_suffix(shared)}({key.number}) OFFSET 0) AS held"
    )
    if milliseconds is not None:
        statement = f"SAVEPOINT {SAVEPOINT};{statement};RELEASE SAVEPOINT {SAVEPOINT}"
    return comment(key) + statement


#: After a timeout inside a transaction, which is usable again then.
BACK_TO_SAVEPOINT = f"ROLLBACK TO SAVEPOINT {SAVEPOINT};RELEASE SAVEPOINT {SAVEPOINT}"


def free_session(key: Key, *, shared: bool) -> str:
    """Free a session lock once; answers whether it was held."""
    return f"SELECT pg_advisory_unlock{_suffix(shared)}({key.number})"


def free_if_granted(key: Key, *, shared: bool) -> str:
    """Free a session lock if this session holds it all the same.

    PostgreSQL may report a timeout or a cancel although the lock was granted in that very moment (measured: one in
    eighty timeouts under contention). Whoever holds a lock already never waits for it, so what is found here is ours.
    """
    mode = "ShareLock" if shared else "ExclusiveLock"
    return (
        f"SELECT pg_advisory_unlock{_suffix(shared)}({key.number}) WHERE EXISTS (SELECT FROM pg_locks "
        f"WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND objsubid = 1 AND granted AND mode = '{mode}' "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
        f"AND (classid::bigint << 32) | objid::bigint = {key.number})"
    )
