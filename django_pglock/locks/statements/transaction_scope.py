"""Transaction locks: held by the transaction.

PostgreSQL frees them with COMMIT, ROLLBACK, or a rollback to a savepoint before the lock.
"""

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

#: The beginning of a lock's own transaction. It must see the changes of the last holder, whatever the role's default
#: is.
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED;"


def acquire_transaction_locks(request: Request) -> Steps:
    """Acquire transaction locks inside a transaction: all of them, or none.

    Raises ``Busy`` and ``StaleSnapshot``. Then nothing is held, and the transaction is usable.
    """
    # Several locks are not tried one by one, because a transaction lock cannot be freed before the end.
    return _try(request) if request.wait == 0 and len(request.keys) == 1 else _wait(request)


def fresh_condition(request: Request) -> str:
    """Return the condition under which a transaction sees the committed changes of the last holder of the lock.

    Only the server knows the isolation level, because role, database, OPTIONS and SET TRANSACTION can set it. Above
    READ COMMITTED, the statement that waits takes the transaction's snapshot before it waits:
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
    # An execute wrapper that reads results may have skipped the row, because it is not that of the last statement.
    return _fresh(row if row is not None else (yield f"SELECT nullif({fresh_condition(request)}, false)"))


def _wait_statement(request: Request) -> str:
    """Return the statement that waits, and restores the caller's lock_timeout.

    Its answer is true; or NULL, if the lock would not protect.
    """
    statement = wait(request, "pg_advisory_xact_lock", condition=fresh_condition(request))
    return comment(request.keys) + (statement if request.wait is None else in_savepoint(statement))


def _fresh(row: Row | None) -> Row:
    if row is None or row[0] is None:
        raise StaleSnapshot
    return row
