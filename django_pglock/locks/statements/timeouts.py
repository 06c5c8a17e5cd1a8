"""Time limits in SQL, and the errors that report them.

``timeout`` becomes ``lock_timeout``, ``max_hold`` becomes the server's idle limits. Both are settings of the server, in
milliseconds: https://www.postgresql.org/docs/current/runtime-config-client.html. The caller's own values are restored.
"""

from __future__ import annotations

import re

from psycopg.errors import LockNotAvailable as ServerTimeout

from django_pglock.locks.options import Request
from django_pglock.locks.statements.fragments import call, keys_in_order
from django_pglock.locks.statements.steps import Busy

SAVEPOINT = "django_pglock_wait"
#: After a timeout inside a transaction, this makes the transaction usable again.
BACK_TO_SAVEPOINT = f"ROLLBACK TO SAVEPOINT {SAVEPOINT};RELEASE SAVEPOINT {SAVEPOINT}"
#: The server's limits for an idle session. The first applies outside of transactions, the second inside.
IDLE_LIMITS = ("idle_session_timeout", "idle_in_transaction_session_timeout")


def in_savepoint(statement: str) -> str:
    """Return a statement inside a savepoint, because a timeout aborts the transaction. RELEASE does not free locks."""
    return f"SAVEPOINT {SAVEPOINT};{statement};RELEASE SAVEPOINT {SAVEPOINT}"


def wait(request: Request, function: str, *, condition: str = "true") -> str:
    """Return one statement that reads the caller's lock_timeout, sets ours, waits, and restores the caller's.

    The columns of the inner row are computed in this order. OFFSET 0 prevents the planner from merging it with the
    outer one. The first column is true; or NULL, if the condition is false and so nothing was locked.
    """
    if len(request.keys) > 1:
        return wait_for_all(request, function, condition=condition)
    return (
        f"SELECT {_answer(request)} FROM (SELECT current_setting('lock_timeout') AS before, "
        f"set_config('lock_timeout', '{request.wait or 0}', true), nullif({condition}, false) AS is_fresh, "
        f"CASE WHEN {condition} THEN {call(function, request)}({request.keys[0].number}) END OFFSET 0) AS held"
    )


def wait_for_all(request: Request, function: str, *, condition: str = "true") -> str:
    """Return the same for several locks, in order, with one time limit for all of them.

    lock_timeout applies to each lock separately, so it is set to the remaining time for each lock.
    """
    limit = "'0'"
    if request.wait is not None:
        passed = "ceil(1000 * extract(epoch FROM clock_timestamp() - statement_timestamp()))"
        # Not more than the whole time, also if the server's clock was put back meanwhile.
        limit = f"greatest(1, {request.wait} - greatest(0, {passed}))::int::text"
    return (
        f"WITH was AS MATERIALIZED (SELECT current_setting('lock_timeout') AS before, {condition} AS is_fresh) "
        f"SELECT {_answer(request)} FROM (SELECT min(before) AS before, bool_and(nullif(is_fresh, false)) AS is_fresh "
        f"FROM (SELECT before, is_fresh, set_config('lock_timeout', {limit}, true), "
        f"CASE WHEN is_fresh THEN {call(function, request)}(k) END FROM was, {keys_in_order(request)} OFFSET 0"
        ") AS each OFFSET 0) AS held"
    )


def _answer(request: Request) -> str:
    limit = ""
    if request.max_hold is not None:
        limit = f", CASE WHEN is_fresh THEN {limit_transaction(request)} END"
    return f"is_fresh, set_config('lock_timeout', before, true){limit}"


def is_own_timeout(error: BaseException, request: Request) -> bool:
    """Return whether the error reports the timeout of the request."""
    # Without our own limit, it is the lock_timeout of the caller or the role, which does not mean "busy".
    return request.wait is not None and (isinstance(error, ServerTimeout) or isinstance(error.__cause__, ServerTimeout))


def raise_if_timeout(error: BaseException, request: Request) -> None:
    """Raise ``Busy`` if the error reports the timeout of the request."""
    if is_own_timeout(error, request):
        raise Busy from error


def limit_transaction(request: Request) -> str:
    """Return the column that sets ``max_hold`` for the rest of the transaction."""
    return f"set_config('{IDLE_LIMITS[1]}', '{request.max_hold}', true)"


def limit_session(request: Request) -> tuple[str, str]:
    """Return the columns that read the idle limits, and those that set ``max_hold`` for the session."""
    before = ", ".join(f"current_setting('{name}')" for name in IDLE_LIMITS)
    return before, ", ".join(f"set_config('{name}', '{request.max_hold}', false)" for name in IDLE_LIMITS)


def restore_limit(name: str, value: str) -> str:
    """Return the column that sets an idle limit of the session to a time in PostgreSQL's format, such as ``7s``."""
    if not re.fullmatch(r"-?\d+(us|ms|s|min|h|d)?", value):
        raise ValueError(f"{value!r} is no time.")
    return f"set_config('{name}', '{value}', false)"
