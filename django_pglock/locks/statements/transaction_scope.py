"""Transaction locks: held by the transaction, and freed by PostgreSQL with COMMIT, ROLLBACK, or a rollback to a
savepoint before the lock."""

from __future__ import annotations

from django.db import Error as DjangoFailure
from psycopg import Error as PsycopgFailure

from django_pglock.locks.options import Request
from django_pglock.locks.statements.fragments import call, comment
from django_pglock.locks.statements.steps import Busy, Row, StaleSnapshot, Steps, granted
from django_pglock.locks.statements.timeouts import (
    BACK_TO_SAVEPOINT,
    in_savepoint,
    is_own_timeout,
    limit_transaction,
    wait,
)

#: A transaction of the lock's own. It must see what the last holder has committed, whatever the role's default is.
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED;"


def acquire_transaction_locks(request: Request) -> Steps:
    """Acquire transaction locks inside a transaction: all of them, or none.

    Raises ``Busy`` and ``StaleSnapshot``; nothing is held then, and the transaction is usable.
    """
    # Several locks are not tried: a transaction lock that was taken could not be given back.
    return _try(request) if request.wait == 0 and len(request.keys) == 1 else _wait(request)


def fresh_condition(request: Request) -> str:
    """Return the condition under which a transaction sees what the last holder of the lock has committed.

    The server alone knows: a role, a database, OPTIONS and SET TRANSACTION have a say. Above READ COMMITTED the
    statement that waits takes the transaction's snapshot before it waits:
    https://www.postgresql.org/docs/current/transaction-iso.html.
    """
    return "true" if request.stale_ok else "starts_with(current_setting('transaction_isolation'), 'read ')"


def _try(request: Request) -> Steps:
    return granted(_fresh((yield _try_statement(request))))


def _try_statement(request: Request) -> str:
    """Return the statement that answers whether the lock was granted, or NULL if it would not protect."""
    statement = f"{call('pg_try_advisory_xact_lock', request)}({request.keys[0].number})"
    if not request.stale_ok:
        statement = f"CASE WHEN {fresh_condition(request)} THEN {statement} END"
    if request.max_hold is not None:
        limit = f"CASE WHEN granted THEN {limit_transaction(request)} END"
        return f"{comment(request.keys)}SELECT granted, {limit} FROM (SELECT {statement} AS granted OFFSET 0) AS asked"
    return f"{comment(request.keys)}SELECT {statement}"


def _wait(request: Request) -> Steps:
    try:
        row = yield _wait_statement(request)
    except (DjangoFailure, PsycopgFailure) as error:
        if is_own_timeout(error, request):
            yield BACK_TO_SAVEPOINT
            raise Busy from error
        raise
    # An execute wrapper that looks at what comes back may have passed over the row, which is not that of the last
    # statement.
    return _fresh(row if row is not None else (yield f"SELECT nullif({fresh_condition(request)}, false)"))


def _wait_statement(request: Request) -> str:
    """Return the statement that waits and leaves the caller's lock_timeout as it was; answers true, or NULL if the lock
    would not protect."""
    statement = wait(request, "pg_advisory_xact_lock", condition=fresh_condition(request))
    return comment(request.keys) + (statement if request.wait is None else in_savepoint(statement))


def _fresh(row: Row | None) -> Row:
    if row is None or row[0] is None:
        raise StaleSnapshot
    return row
