"""Session locks: held by the database session until they are freed, or until the session ends."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from django.db import Error as DjangoFailure
from psycopg import Error as PsycopgFailure

from django_pglock.locks.options import Request
from django_pglock.locks.statements.fragments import call, call_for_each, comment, held_keys, keys_in_order
from django_pglock.locks.statements.steps import END_SESSION, Steps, granted
from django_pglock.locks.statements.timeouts import (
    BACK_TO_SAVEPOINT,
    IDLE_LIMITS,
    in_savepoint,
    limit_session,
    raise_if_timeout,
    restore_limit,
    wait,
    wait_for_all,
)


def acquire_session_locks(request: Request, *, in_test: bool = False) -> Steps:
    """Acquire session locks: all of them, or none. Raises ``Busy``. Then nothing is held.

    ``in_test``: the locks are acquired inside the transaction that ``TestCase`` has opened. After any other error the
    session may hold the locks nevertheless; see ``free_after_error``.
    """
    if request.wait == 0:
        return _try(request)
    return _wait_in_test(request) if in_test else _wait(request)


def _try(request: Request) -> Steps:
    return granted((yield _try_statement(request)))


def _try_statement(request: Request) -> str:
    if len(request.keys) > 1:
        statement = _try_all(request)
    else:
        statement = f"SELECT {call('pg_try_advisory_lock', request)}({request.keys[0].number})"
    if request.max_hold is not None:
        before, limit = limit_session(request)
        # CASE, so that a session that does not get the lock keeps its settings.
        columns = f"granted, {before}, CASE WHEN granted THEN ROW({limit}) END"
        statement = f"SELECT {columns} FROM ({statement} OFFSET 0) AS asked (granted)"
    return comment(request.keys) + statement


def _try_all(request: Request) -> str:
    """Return the statement that takes the free locks, and frees them again if some locks are not free.

    It is one statement, so that other sessions find only some of the locks taken for as short a time as possible.
    """
    return (
        f"SELECT granted FROM (WITH got AS MATERIALIZED (SELECT k, {call('pg_try_advisory_lock', request)}(k) AS ok "
        f"FROM {keys_in_order(request)}), verdict AS MATERIALIZED (SELECT bool_and(ok) AS granted FROM got) "
        f"SELECT granted, (SELECT count({call('pg_advisory_unlock', request)}(k)) FROM got WHERE ok AND NOT granted) "
        "FROM verdict OFFSET 0) AS tried"
    )


def _wait(request: Request) -> Steps:
    try:
        return (yield _wait_statement(request)) or (True,)
    except (DjangoFailure, PsycopgFailure) as error:
        raise_if_timeout(error, request)
        raise


def _wait_statement(request: Request) -> str:
    """Return the message that waits for session locks in autocommit.

    One message is one implicit transaction, so the settings are restored at its end. Its first statement also switches
    off the role's statement_timeout, which would otherwise end a longer wait. A wait without limit does not switch it
    off, because the operator has set it as a safety net.

    With a limit, the message waits for transaction locks. The reason: PostgreSQL may report a timeout although it has
    granted the lock at the same moment (measured: one in eighty timeouts under contention). Transaction locks end with
    the message in any case. A session that has them gets the session locks without waiting. This is a separate
    statement, because PostgreSQL checks before each statement whether a timeout is pending. Within one statement, it
    would first take the session lock, and then report the timeout.
    """
    if request.wait is None:
        return f"{comment(request.keys)}SET LOCAL lock_timeout = 0;{_keep(request)}"
    limits = f"SET LOCAL lock_timeout = {request.wait};SET LOCAL statement_timeout = 0"
    if len(request.keys) == 1:
        waiting = call_for_each("pg_advisory_xact_lock", request)
    else:
        waiting = wait_for_all(request._replace(max_hold=None), "pg_advisory_xact_lock")
    return f"{comment(request.keys)}{limits};{waiting};{_keep(request)}"


def _keep(request: Request) -> str:
    taken = call_for_each("pg_advisory_lock", request)
    if request.max_hold is None:
        return taken
    before, limit = limit_session(request)
    return f"{taken};SELECT true, {before}, {limit}"


def _wait_in_test(request: Request) -> Steps:
    # A transaction lock would stay until the end of the test, so this waits for the session lock itself.
    waiting = wait(request._replace(max_hold=None), "pg_advisory_lock")
    try:
        return (yield comment(request.keys) + in_savepoint(waiting)) or (True,)
    except (DjangoFailure, PsycopgFailure) as error:
        # The lock may be granted at the moment at which its timeout is reported.
        yield from back_to_savepoint_without(request)
        raise_if_timeout(error, request)
        raise


def back_to_savepoint_without(request: Request) -> Steps:
    """Roll back to the savepoint before the wait, so that the transaction is usable, and free locks that were taken."""
    try:
        yield BACK_TO_SAVEPOINT
        yield free_if_held_statement(request)
    except BaseException:  # noqa: BLE001 - the first error is raised
        yield END_SESSION
    return None


def free_statement(request: Request, limits: Sequence[str] = ()) -> str:
    """Return the statement that frees each session lock once. Its first column says whether the session held all.

    ``limits`` are the idle limits to restore, from the answer of the acquire.
    """
    if len(request.keys) == 1:
        freed = f"{call('pg_advisory_unlock', request)}({request.keys[0].number})"
        source = ""
    else:
        freed = f"bool_and({call('pg_advisory_unlock', request)}(k))"
        source = f" FROM {keys_in_order(request)}"
    for name, value in zip(IDLE_LIMITS, limits, strict=False):
        freed += f", {restore_limit(name, value)}"
    return f"SELECT {freed}{source}"


def free_if_held_statement(request: Request) -> str:
    """Return the statement that frees session locks if this session holds them after an error.

    A session that already held a lock does not wait for it. So a lock that is found here was taken by this request.
    """
    return f"SELECT {call('pg_advisory_unlock', request)}(k) {held_keys(request)}"


def free_after_error(request: Request, *, others: AbstractSet[int]) -> Steps:
    """Ensure that no session lock of a request stays after an error.

    A statement that was cancelled, or whose answer was lost, may have taken its locks nevertheless. ``others`` are the
    numbers that the session also holds for other records. The server does not report how often it holds one of them.
    """
    if not others.isdisjoint(request.numbers):
        yield END_SESSION
        return None
    try:
        yield free_if_held_statement(request)
    except BaseException:  # noqa: BLE001 - the first error is raised
        yield END_SESSION
    return None
