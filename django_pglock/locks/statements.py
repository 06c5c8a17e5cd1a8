"""The statements that take and free advisory locks, as text without parameters.

Keys and times are ints of ours, and the name stands in a comment from which everything that could end it is taken.
Without parameters several statements travel in one message, so that each acquire is one round trip.

The answer is always the last result of the message. Its first column says whether the lock was granted; with a limit
on holding, the next two are the settings as they were before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from django_pglock.conf import get_settings
from django_pglock.keys import Key
from django_pglock.locks.options import Request

SAVEPOINT = "django_pglock_wait"
LONGEST_NAME = 200
#: Seconds between two looks of the first in a semaphore's queue.
BETWEEN_LOOKS = 0.02
#: pg_stat_activity shows the first kilobyte of a statement; more names would hide what it does.
MOST_NAMES = 4
#: The server's limits on a holder that does nothing. The first reigns outside transactions, the second inside.
IDLE_LIMITS = ("idle_session_timeout", "idle_in_transaction_session_timeout")
_NOT_IN_COMMENTS = re.compile(r"[\x00-\x1f\x7f]|\*(?=/)|/(?=\*)")
#: psycopg and many others take a percent sign in a statement for a parameter, also in a comment.
PERCENT = "\uff05"


def comment(keys: Sequence[Key]) -> str:
    """Return comments that name locks in pg_stat_activity; nested or unfinished comments cannot arise."""
    return _comment(tuple(keys[:MOST_NAMES])) if get_settings().LOCK_COMMENTS else ""


@lru_cache(maxsize=1024)
def _comment(keys: tuple[Key, ...]) -> str:
    return "".join([f"/* django_pglock:{key.number} {_harmless(key.name)} */ " for key in keys])


def _harmless(name: str) -> str:
    # A slash or an asterisk at the end would meet the comment's own.
    shown = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
    return _NOT_IN_COMMENTS.sub("?", shown).replace("%", PERCENT)


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
        before, limit = _limits(request)
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
    if len(request.keys) == 1:
        waiting = _over("pg_advisory_xact_lock", request)
    else:
        waiting = _wait_for_all("pg_advisory_xact_lock", request._replace(max_hold=None))
    return f"{comment(request.keys)}{limits};{waiting};{_keep(request)}"


def wait_session_inside(request: Request) -> str:
    """Wait for session locks inside a transaction; only ``TestCase``'s own comes here. All or none is up to the caller.

    A transaction lock would stay to the end of the test, so the session lock itself is waited for.
    """
    return comment(request.keys) + _in_savepoint(_wait(request._replace(max_hold=None), "pg_advisory_lock"))


def _keep(request: Request) -> str:
    taken = _over("pg_advisory_lock", request)
    if request.max_hold is None:
        return taken
    before, limit = _limits(request)
    return f"{taken};SELECT true, {before}, {limit}"


def _limits(request: Request) -> tuple[str, str]:
    """Return the columns that ask for the idle limits, and those that set them for the session."""
    before = ", ".join(f"current_setting('{name}')" for name in IDLE_LIMITS)
    return before, ", ".join(f"set_config('{name}', '{request.max_hold}', false)" for name in IDLE_LIMITS)


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
    for name, value in zip(IDLE_LIMITS, before, strict=False):
        freed += f", set_config('{name}', '{int_setting(value)}', false)"
    return f"SELECT {freed}{source}"


def int_setting(value: str) -> str:
    """Return a setting of time as PostgreSQL shows it, such as ``7s``, if it is nothing else."""
    if not re.fullmatch(r"-?\d+(us|ms|s|min|h|d)?", value):
        raise ValueError(f"{value!r} is no time.")
    return value


def free_if_granted(request: Request) -> str:
    """Free session locks if this session holds them after an error.

    Whoever held a lock already never waits for it, so what is found here was taken just now.
    """
    return f"SELECT {_call('pg_advisory_unlock', request)}(k) {_which_are_held(request)}"


def _which_are_held(request: Request) -> str:
    """Return the part of a SELECT that yields those keys that this session holds."""
    mode = "ShareLock" if request.shared else "ExclusiveLock"
    return (
        f"FROM {_array(request.keys)} AS k "
        "WHERE EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND objsubid = 1 "
        f"AND granted AND mode = '{mode}' AND database = (SELECT oid FROM pg_database WHERE datname = "
        "current_database()) AND (classid::bigint << 32) | objid::bigint = k)"
    )


# Transaction locks


def _is_fresh(request: Request) -> str:
    """Return the condition under which a transaction sees what the last holder of the lock has committed.

    The server alone knows: a role, a database, OPTIONS and SET TRANSACTION have a say. Above READ COMMITTED the
    statement that waits takes the transaction's snapshot before it waits.
    """
    return "true" if request.stale_ok else "starts_with(current_setting('transaction_isolation'), 'read ')"


def is_fresh(request: Request) -> str:
    """Ask whether a lock protects in this transaction; answers true, or NULL."""
    return f"SELECT nullif({_is_fresh(request)}, false)"


def try_transaction(request: Request) -> str:
    """Take a transaction lock if it is free; answers whether, or NULL if it would not protect.

    For one key: what was taken could not be given back.
    """
    granted = f"{_call('pg_try_advisory_xact_lock', request)}({request.keys[0].number})"
    if not request.stale_ok:
        granted = f"CASE WHEN {_is_fresh(request)} THEN {granted} END"
    if request.max_hold is not None:
        limit = f"CASE WHEN granted THEN set_config('{IDLE_LIMITS[1]}', '{request.max_hold}', true) END"
        return f"{comment(request.keys)}SELECT granted, {limit} FROM (SELECT {granted} AS granted OFFSET 0) AS asked"
    return f"{comment(request.keys)}SELECT {granted}"


def wait_transaction(request: Request) -> str:
    """Wait for transaction locks inside a transaction, and leave the caller's lock_timeout as it was.

    Answers NULL if the lock would not protect. With a limit a savepoint surrounds the wait, because a timeout would
    abort the transaction; the lock survives its release.
    """
    statement = _wait(request, "pg_advisory_xact_lock", condition=_is_fresh(request))
    return comment(request.keys) + (statement if request.wait is None else _in_savepoint(statement))


def _in_savepoint(statement: str) -> str:
    return f"SAVEPOINT {SAVEPOINT};{statement};RELEASE SAVEPOINT {SAVEPOINT}"


def _wait(request: Request, function: str, *, condition: str = "true") -> str:
    """Return one statement that remembers the caller's lock_timeout, sets ours, waits, and puts it back.

    The inner row does so in this order; OFFSET 0 keeps the planner from merging it with the outer one. The first
    column answers true or, where the condition does not hold and nothing was locked, NULL.
    """
    if len(request.keys) > 1:
        return _wait_for_all(function, request, condition)
    return (
        f"SELECT {_answer(request)} FROM (SELECT current_setting('lock_timeout') AS before, "
        f"set_config('lock_timeout', '{request.wait or 0}', true), nullif({condition}, false) AS is_fresh, "
        f"CASE WHEN {condition} THEN {_call(function, request)}({request.keys[0].number}) END OFFSET 0) AS held"
    )


def _answer(request: Request) -> str:
    limit = ""
    if request.max_hold is not None:
        limit = f", CASE WHEN is_fresh THEN set_config('{IDLE_LIMITS[1]}', '{request.max_hold}', true) END"
    return f"is_fresh, set_config('lock_timeout', before, true){limit}"


def _wait_for_all(function: str, request: Request, condition: str = "true") -> str:
    """The same for several locks, in order, for no longer than the limit altogether.

    lock_timeout counts for each lock anew, so each is given what is left of the time.
    """
    limit = "'0'"
    if request.wait is not None:
        passed = "ceil(1000 * extract(epoch FROM clock_timestamp() - statement_timestamp()))"
        limit = f"greatest(1, {request.wait} - {passed})::int::text"
    return (
        f"WITH was AS MATERIALIZED (SELECT current_setting('lock_timeout') AS before, {condition} AS is_fresh) "
        f"SELECT {_answer(request)} FROM (SELECT min(before) AS before, bool_and(nullif(is_fresh, false)) AS is_fresh "
        f"FROM (SELECT before, is_fresh, set_config('lock_timeout', {limit}, true), "
        f"CASE WHEN is_fresh THEN {_call(function, request)}(k) END FROM was, {_array(request.keys)} AS k OFFSET 0"
        ") AS each OFFSET 0) AS held"
    )


# Semaphores


def try_slot(request: Request, function: str, queue: Key | None) -> str:
    """Take a slot that is free, if nobody waits in the queue; answers its number, NULL or no row.

    Without a queue it is not looked whether anybody waits. No ORDER BY: sorting would try all slots.
    """
    slots = f"SELECT k FROM {_array(request.keys)} AS k WHERE {function}(k) LIMIT 1"
    if queue is None:
        return f"{comment(request.keys)}{slots}"
    # A shared lock, so that those who only look do not keep out each other; it ends with the statement.
    first = f"SELECT pg_try_advisory_xact_lock_shared({queue.number}) AS is_first OFFSET 0"
    slots = slots.replace("WHERE", "WHERE is_first AND")
    return f"{comment(request.keys)}SELECT slot.k FROM ({first}) AS queue, LATERAL ({slots}) AS slot"


def wait_for_slot(request: Request, function: str, queue: Key) -> str:
    """Wait in autocommit for one of several slots; answers its number, or no row when the time is over.

    PostgreSQL cannot wait for one of several locks. So all who wait queue up for one lock, and it is the first of them
    alone who looks for a slot. The queue's lock ends with the message, which is one transaction.
    """
    limit = f"SET LOCAL lock_timeout = {request.wait or 0}"
    if request.wait is not None:
        limit += ";SET LOCAL statement_timeout = 0"
    waiting = f"SELECT pg_advisory_xact_lock({queue.number})"
    return f"{comment((queue, *request.keys))}{limit};{waiting};{_look_for_slot(request, function)}"


def wait_for_slot_inside(request: Request, function: str, queue: Key) -> str:
    """The same inside a transaction, to whose end a transaction lock on the queue would last."""
    waiting = _wait(request._replace(keys=(queue,), max_hold=None), "pg_advisory_lock", condition=_is_fresh(request))
    found = f"SELECT ({_look_for_slot(request, function)}) AS slot, {_is_fresh(request)} AS is_fresh OFFSET 0"
    leaving = f"CASE WHEN is_fresh THEN pg_advisory_unlock({queue.number}) END"
    looking = f"SELECT slot, nullif(is_fresh, false), {leaving} FROM ({found}) AS found"
    return comment((queue, *request.keys)) + _in_savepoint(f"{waiting};{looking}")


def held_slot(request: Request) -> str:
    """Ask which slot the session has; answers its number, or no row."""
    return f"SELECT k, true {_which_are_held(request)} LIMIT 1"


def _look_for_slot(request: Request, function: str) -> str:
    """Look for a free slot again and again, in the server and in one statement.

    A statement each time would cost a round trip, and a wait for one slot with a limit writes an error into the
    server's log each time that the limit is reached.
    """
    fresh = _is_fresh(request) if "xact" in function else "true"
    slots = f"SELECT k FROM {_array(request.keys)} AS k WHERE {{}} AND {function}(k) LIMIT 1"
    end = "" if request.wait is None else f"clock_timestamp() < statement_timestamp() + '{request.wait} ms' AND "
    return (
        f"WITH RECURSIVE look (slot) AS (SELECT ({slots.format(fresh)}) UNION ALL "
        f"SELECT ({slots.format('look.slot IS NULL')}) FROM look "
        f"WHERE look.slot IS NULL AND {fresh} AND {end}pg_sleep({BETWEEN_LOOKS}) IS NOT NULL) "
        "SELECT slot FROM look WHERE slot IS NOT NULL"
    )


#: A transaction of the lock's own. It must see what the last holder has committed, whatever the role's default is.
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED;"
#: After a timeout inside a transaction, which is usable again then.
BACK_TO_SAVEPOINT = f"ROLLBACK TO SAVEPOINT {SAVEPOINT};RELEASE SAVEPOINT {SAVEPOINT}"
