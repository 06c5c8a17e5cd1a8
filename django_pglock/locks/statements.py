"""The statements that take and free advisory locks, as text without parameters.

Keys and times are ints of ours, and the name stands in a comment from which everything that could end it is taken.
Without parameters several statements travel in one message, so that each acquire is one round trip.

The answer is always the last result of the message. Its first column says whether the lock was granted; with a limit
on holding, the next two are the settings as they were before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from django_pglock.conf import get_settings
from django_pglock.keys import Key
from django_pglock.locks.options import Request

SAVEPOINT = "django_pglock_wait"
LONGEST_NAME = 200
#: pg_stat_activity shows the first kilobyte of a statement; more names would hide what it does.
MOST_NAMES = 4
#: The server's limits on a holder that does nothing. The first reigns outside transactions, the second inside.
IDLE_LIMITS = ("idle_session_timeout", "idle_in_transaction_session_timeout")
_NOT_IN_COMMENTS = re.compile(r"[\x00-\x1f\x7f]|\*(?=/)|/(?=\*)")


def comment(keys: Iterable[Key]) -> str:
    """Return comments that name locks in pg_stat_activity; nested or unfinished comments cannot arise."""
    if not get_settings().LOCK_COMMENTS:
        return ""
    return "".join(f"/* django_pglock:{key.number} {_harmless(key.name)} */ " for key in [*keys][:MOST_NAMES])


def _harmless(name: str) -> str:
    # A slash or an asterisk at the end would meet the comment's own.
    return _NOT_IN_COMMENTS.sub("?", name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…")


def _call(function: str, request: Request) -> str:
    """Return the beginning of a call of an advisory lock function, in the mode that is asked for."""
    return f"{function}{'_shared' if request.shared else ''}"


def _array(keys: Sequence[Key]) -> str:
    # Made from ints; unnest yields them in their order.
    return f"unnest(ARRAY[{','.join(str(key.number) for key in keys)}]::bigint[])"


def _over(function: str, request: Request) -> str:
    """Return a SELECT that calls a function for each key, in order."""
    if len(request.keys) == 1:
        return f"SELECT {_call(function, request)}({request.keys[0].number})"
    return f"SELECT {_call(function, request)}(k) FROM {_array(request.keys)} AS k"


# Session locks


def try_session(request: Request) -> str:
    """Take session locks if all are free, else none; answers whether."""
    if len(request.keys) > 1:
        granted = _try_all(request)
    else:
        granted = f"{_call('pg_try_advisory_lock', request)}({request.keys[0].number})"
        granted = f"SELECT {granted}" if request.max_hold is None else f"SELECT {granted} AS granted OFFSET 0"
    if request.max_hold is not None:
        before = ", ".join(f"current_setting('{name}')" for name in IDLE_LIMITS)
        limit = ", ".join(f"set_config('{name}', '{request.max_hold}', false)" for name in IDLE_LIMITS)
        # CASE, so that who does not get the lock keeps the settings.
        granted = f"SELECT granted, {before}, CASE WHEN granted THEN ROW({limit}) END FROM ({granted}) AS asked"
    return comment(request.keys) + granted


def _try_all(request: Request) -> str:
    """Take what is free; if that is not all, give back what was taken. In one statement, so nobody sees it half done
    for longer than this takes."""
    return (
        f"SELECT granted FROM (WITH got AS MATERIALIZED (SELECT k, {_call('pg_try_advisory_lock', request)}(k) AS ok "
        f"FROM {_array(request.keys)} AS k), verdict AS MATERIALIZED (SELECT bool_and(ok) AS granted FROM got) "
        f"SELECT granted, (SELECT count({_call('pg_advisory_unlock', request)}(k)) FROM got WHERE ok AND NOT granted) "
        "FROM verdict OFFSET 0) AS tried OFFSET 0"
    )


def wait_session(request: Request) -> str:
    """Wait for session locks, in autocommit; all or none.

    One message is one implicit transaction, so the settings are back when it ends. Its first statement also lifts the
    role's statement_timeout, which would otherwise cut a longer wait short; a wait without limit leaves it in force,
    as the net that the operator has spread.

    With a limit, what is waited for are transaction locks: PostgreSQL may report a timeout although it granted the
    lock in that very moment (measured: one in eighty timeouts under contention), and those end with the message. Who
    has them gets the session locks without waiting. In a statement of its own: before each one PostgreSQL looks
    whether a timeout is still to be reported; within one it would take the session lock first and report it then.
    """
    if request.wait is None:
        return f"{comment(request.keys)}SET LOCAL lock_timeout = 0;{_keep(request)}"
    limits = f"SET LOCAL lock_timeout = {request.wait};SET LOCAL statement_timeout = 0"
    one = len(request.keys) == 1
    waiting = _over("pg_advisory_xact_lock", request) if one else _wait_for_all("pg_advisory_xact_lock", request)
    return f"{comment(request.keys)}{limits};{waiting};{_keep(request)}"


def wait_session_inside(request: Request) -> str:
    """Wait for session locks inside a transaction; only ``TestCase``'s own comes here. All or none is up to the caller.

    A transaction lock would stay to the end of the test, so the session lock itself is waited for.
    """
    return comment(request.keys) + _in_savepoint(_wait(request, "pg_advisory_lock"))


def _keep(request: Request) -> str:
    taken = _over("pg_advisory_lock", request)
    if request.max_hold is None:
        return taken
    before = ", ".join(f"current_setting('{name}')" for name in IDLE_LIMITS)
    limit = ", ".join(f"set_config('{name}', '{request.max_hold}', false)" for name in IDLE_LIMITS)
    return f"{taken};SELECT true, {before}, {limit}"


def free_session(request: Request, before: Sequence[str] = ()) -> str:
    """Free session locks once each; the answer's first column says whether all were held.

    ``before`` are the idle limits to put back, as the acquire answered them.
    """
    if len(request.keys) == 1:
        freed = f"{_call('pg_advisory_unlock', request)}({request.keys[0].number})"
        source = ""
    else:
        freed = f"bool_and({_call('pg_advisory_unlock', request)}(k))"
        source = f" FROM {_array(request.keys)} AS k"
    restored = "".join(
        f", set_config('{name}', '{int_setting(value)}', false)"
        for name, value in zip(IDLE_LIMITS, before, strict=False)
    )
    return f"SELECT {freed}{restored}{source}"


def int_setting(value: str) -> str:
    """Return a setting of time as PostgreSQL shows it, such as ``7s``, if it is nothing else."""
    if not re.fullmatch(r"-?\d+(us|ms|s|min|h|d)?", value):
        raise ValueError(f"{value!r} is no time.")
    return value


def free_if_granted(request: Request) -> str:
    """Free session locks if this session holds them after an error.

    Whoever held a lock already never waits for it, so what is found here was taken just now.
    """
    mode = "ShareLock" if request.shared else "ExclusiveLock"
    return (
        f"SELECT {_call('pg_advisory_unlock', request)}(k) FROM {_array(request.keys)} AS k "
        "WHERE EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND objsubid = 1 "
        f"AND granted AND mode = '{mode}' AND database = (SELECT oid FROM pg_database WHERE datname = "
        "current_database()) AND (classid::bigint << 32) | objid::bigint = k)"
    )


# Transaction locks


def try_transaction(request: Request) -> str:
    """Take a transaction lock if it is free; answers whether. For one key: what was taken could not be given back."""
    tried = f"{_call('pg_try_advisory_xact_lock', request)}({request.keys[0].number})"
    limit = ""
    if request.max_hold is not None:
        name = IDLE_LIMITS[1]
        limit = f", CASE WHEN granted THEN set_config('{name}', '{request.max_hold}', true) END"
        return f"{comment(request.keys)}SELECT granted{limit} FROM (SELECT {tried} AS granted OFFSET 0) AS asked"
    return f"{comment(request.keys)}SELECT {tried}"


def wait_transaction(request: Request) -> str:
    """Wait for transaction locks inside a transaction, and leave the caller's lock_timeout as it was.

    With a limit a savepoint surrounds it, because a timeout would abort the transaction; the lock survives its release.
    """
    statement = _wait(request, "pg_advisory_xact_lock")
    if request.max_hold is not None:
        statement += f";SELECT set_config('{IDLE_LIMITS[1]}', '{request.max_hold}', true)"
    if request.wait is not None:
        statement = _in_savepoint(statement)
    return comment(request.keys) + statement


def _in_savepoint(statement: str) -> str:
    return f"SAVEPOINT {SAVEPOINT};{statement};RELEASE SAVEPOINT {SAVEPOINT}"


def _wait(request: Request, function: str) -> str:
    """Return one statement that remembers the caller's lock_timeout, sets ours, waits, and puts it back.

    The inner row does so in this order; OFFSET 0 keeps the planner from merging it with the outer one.
    """
    if len(request.keys) > 1:
        return _wait_for_all(function, request)
    return (
        "SELECT set_config('lock_timeout', before, true) FROM ("
        "SELECT current_setting('lock_timeout') AS before, "
        f"set_config('lock_timeout', '{request.wait or 0}', true), "
        f"{_call(function, request)}({request.keys[0].number}) OFFSET 0) AS held"
    )


def _wait_for_all(function: str, request: Request) -> str:
    """The same for several locks, in order, for no longer than the limit altogether.

    lock_timeout counts for each lock anew, so each is given what is left of the time.
    """
    limit = "'0'"
    if request.wait is not None:
        passed = "ceil(1000 * extract(epoch FROM clock_timestamp() - statement_timestamp()))"
        limit = f"greatest(1, {request.wait} - {passed})::int::text"
    return (
        "WITH was AS MATERIALIZED (SELECT current_setting('lock_timeout') AS before) "
        "SELECT set_config('lock_timeout', min(before), true) FROM ("
        f"SELECT before, set_config('lock_timeout', {limit}, true), {_call(function, request)}(k) "
        f"FROM was, {_array(request.keys)} AS k OFFSET 0) AS held"
    )


def try_any(keys: Sequence[Key], function: str) -> str:
    """Take the first of these that is free; answers its number, or no row. No ORDER BY: sorting would try them all."""
    return f"{comment(keys[:1])}SELECT k FROM {_array(keys)} AS k WHERE {function}(k) LIMIT 1"


#: After a timeout inside a transaction, which is usable again then.
BACK_TO_SAVEPOINT = f"ROLLBACK TO SAVEPOINT {SAVEPOINT};RELEASE SAVEPOINT {SAVEPOINT}"
