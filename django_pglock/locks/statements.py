"""The statements that acquire and free advisory locks, and their order.

Locks are acquired in *steps*: a generator yields a statement, gets the row of the answer or the error of the statement,
and returns the row that says which lock was granted. So threads and coroutines send the same statements. If the steps
cannot know what the session holds, they yield ``END_SESSION`` instead of a statement, because no lock remains after the
end of the session.

Statements have no parameters. Keys and times are our own ints. The name is in a comment, without characters that could
end the comment. Because there are no parameters, one message can have several statements, so that each acquire is one
round trip. The answer is always the last result of the message. Its first column says whether the lock was granted.
With ``max_hold``, the next two columns are the previous idle limits.

PostgreSQL's rules: https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS and
https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADVISORY-LOCKS.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Generator, Sequence
from functools import lru_cache
from typing import Any

from django.db import Error as DjangoFailure
from psycopg import Error as PsycopgFailure
from psycopg.errors import LockNotAvailable as ServerTimeout

from django_pglock.keys import Key
from django_pglock.locks.request import Request

Row = Sequence[Any]
#: For a statement without rows, None is sent to the generator.
Steps = Generator[str, "Row | None", "Row | None"]
#: Not a statement: end the session.
END_SESSION = ""
#: Characters of a name in a comment.
LONGEST_NAME = 200
#: pg_stat_activity shows the first kilobyte of a statement. With more names, the statement itself would not be shown.
MOST_NAMES = 4
_NOT_IN_COMMENTS = re.compile(r"[\x00-\x1f\x7f]|\*(?=/)|/(?=\*)")
#: For psycopg and many other programs a percent sign in a statement is a placeholder, also in a comment.
PERCENT = "\uff05"
SAVEPOINT = "django_pglock_wait"
#: After a timeout inside a transaction, this makes the transaction usable again.
BACK_TO_SAVEPOINT = f"ROLLBACK TO SAVEPOINT {SAVEPOINT};RELEASE SAVEPOINT {SAVEPOINT}"
#: The server's limits for an idle session. The first applies outside of transactions, the second inside.
IDLE_LIMITS = ("idle_session_timeout", "idle_in_transaction_session_timeout")
#: The beginning of a lock's own transaction. It must see the changes of the last holder, whatever the role's default
#: is.
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED;"
#: Seconds between two polls for a free slot by the first in the queue of a semaphore.
SEMAPHORE_POLL = 0.02


class Busy(Exception):
    """Another session holds the lock. The cause is the server's own error, if the server waited for the lock."""


class StaleSnapshot(Exception):
    """The transaction would not see what the last holder has committed. Nothing was locked."""


def run_steps(steps: Steps, send: Callable[[str], Row | None], end: Callable[[], Row | None]) -> Row | None:
    """Run steps and return their result. ``send`` sends a statement and returns its row, ``end`` ends the session."""
    try:
        statement = next(steps)
        while True:
            try:
                row = send(statement) if statement != END_SESSION else end()
            except BaseException as error:  # noqa: BLE001, PERF203 - the steps decide
                statement = steps.throw(error)
            else:
                statement = steps.send(row)
    except StopIteration as end:
        answer: Row | None = end.value
        return answer


async def run_steps_async(
    steps: Steps, send: Callable[[str], Awaitable[Row | None]], end: Callable[[], Row | None]
) -> Row | None:
    """Do the same as ``run_steps``, in a coroutine."""
    try:
        statement = next(steps)
        while True:
            try:
                row = await send(statement) if statement != END_SESSION else end()
            except BaseException as error:  # noqa: BLE001, PERF203 - the steps decide
                statement = steps.throw(error)
            else:
                statement = steps.send(row)
    except StopIteration as end:
        answer: Row | None = end.value
        return answer


def granted(row: Row | None) -> Row:
    """Return the row of an answer whose first column says that the lock was granted. Raises ``Busy``."""
    if row is None or not row[0]:
        raise Busy
    return row


def _fresh(row: Row | None) -> Row:
    if row is None or row[0] is None:
        raise StaleSnapshot
    return row


def _raise_if_timeout(error: BaseException, request: Request) -> None:
    """Raise ``Busy`` if the error reports the timeout of the request."""
    # Without our own limit, it is the lock_timeout of the caller or the role, which does not mean "busy".
    if request.timeout is not None and any(isinstance(each, ServerTimeout) for each in (error, error.__cause__)):
        raise Busy from error


def acquire(request: Request, scope: str, *, inside: bool = False, in_test: bool = False) -> Steps:
    """Acquire what a request asks for. ``inside``: within a transaction, ``in_test``: within that of a ``TestCase``.

    Raises ``Busy`` and ``StaleSnapshot``. Then nothing is held.
    """
    if request.queue is not None:
        return acquire_slot(request, scope, inside=inside)
    return (
        acquire_transaction_locks(request)
        if scope == "transaction"
        else acquire_session_locks(request, in_test=in_test)
    )


# Parts of statements


@lru_cache(maxsize=1024)
def comment(keys: tuple[Key, ...]) -> str:
    """Return comments with the names of locks, for pg_stat_activity. They are never nested or unfinished."""
    return "".join([f"/* django_pglock:{key.number} {_harmless(key.name)} */ " for key in keys[:MOST_NAMES]])


def _harmless(name: str) -> str:
    # A slash or an asterisk at the end, next to that of the comment, could end the comment.
    shown = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
    return _NOT_IN_COMMENTS.sub("?", shown).replace("%", PERCENT)


def _in_mode(function: str, request: Request) -> str:
    return f"{function}_shared" if request.shared else function


def _keys_in_order(request: Request) -> str:
    """Return the set of rows ``k`` that yields the request's numbers in their order."""
    # Made from ints.
    return f"unnest(ARRAY[{','.join(map(str, request.numbers))}]::bigint[]) AS k"


def _call_for_each(function: str, request: Request) -> str:
    """Return a SELECT that calls a function for each key, in order."""
    mode = "_shared" if request.shared else ""
    if len(request.keys) == 1:
        return f"SELECT {function}{mode}({request.keys[0].number})"
    return f"SELECT {function}{mode}(k) FROM {_keys_in_order(request)}"


def _held_keys(request: Request) -> str:
    """Return the FROM and WHERE that yield those keys ``k`` that this session holds.

    pg_locks shows a 64-bit key as two halves, with ``objsubid`` 1:
    https://www.postgresql.org/docs/current/view-pg-locks.html.
    """
    mode = "ShareLock" if request.shared else "ExclusiveLock"
    return (
        f"FROM {_keys_in_order(request)} "
        "WHERE EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND objsubid = 1 "
        f"AND granted AND mode = '{mode}' AND database = (SELECT oid FROM pg_database WHERE datname = "
        "current_database()) AND (classid::bigint << 32) | objid::bigint = k)"
    )


def holds_all_statement(request: Request) -> str:
    """Return the statement that says whether this session holds all locks of a request."""
    return f"SELECT count(*) = {len(request.keys)} {_held_keys(request)}"


def holds_any_statement(request: Request) -> str:
    """Return the statement that has a row if this session holds one of the locks, in any mode."""
    either = " UNION ALL ".join(f"SELECT 1 {_held_keys(request._replace(shared=each))}" for each in (False, True))
    return f"{either} LIMIT 1"


def in_savepoint(statement: str) -> str:
    """Return a statement inside a savepoint, because a timeout aborts the transaction. RELEASE does not free locks."""
    return f"SAVEPOINT {SAVEPOINT};{statement};RELEASE SAVEPOINT {SAVEPOINT}"


def wait_for_all(request: Request, function: str, *, condition: str = "true") -> str:
    """Return one statement that reads the caller's lock_timeout, waits for the locks in order, and restores it.

    lock_timeout applies to each lock separately, so it is set to the remaining time for each lock. OFFSET 0 prevents
    the planner from merging the inner rows with the outer one. The first column is true; or NULL, if the condition is
    false and so nothing was locked.
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
        f"CASE WHEN is_fresh THEN {_in_mode(function, request)}(k) END FROM was, {_keys_in_order(request)} OFFSET 0"
        ") AS each OFFSET 0) AS held"
    )


def _answer(request: Request) -> str:
    limit = ""
    if request.max_hold is not None:
        limit = f", CASE WHEN is_fresh THEN {_limit_transaction(request)} END"
    return f"is_fresh, set_config('lock_timeout', before, true){limit}"


# How long the holder may be idle


def _limit_transaction(request: Request) -> str:
    """Return the column that sets ``max_hold`` for the rest of the transaction."""
    return f"set_config('{IDLE_LIMITS[1]}', '{request.max_hold}', true)"


def _limit_session(request: Request) -> tuple[str, str]:
    """Return the columns that read the idle limits, and those that set ``max_hold`` for the session."""
    before = ", ".join(f"current_setting('{name}')" for name in IDLE_LIMITS)
    return before, ", ".join(f"set_config('{name}', '{request.max_hold}', false)" for name in IDLE_LIMITS)


def restore_limit(name: str, value: str) -> str:
    """Return the column that sets an idle limit of the session to a time in PostgreSQL's format, such as ``7s``."""
    if not re.fullmatch(r"-?\d+(us|ms|s|min|h|d)?", value):
        raise ValueError(f"{value!r} is no time.")
    return f"set_config('{name}', '{value}', false)"


# Session locks: held by the database session until they are freed, or until the session ends


def acquire_session_locks(request: Request, *, in_test: bool = False) -> Steps:
    """Acquire session locks: all of them, or none. Raises ``Busy``. Then nothing is held.

    ``in_test``: the locks are acquired inside the transaction that ``TestCase`` has opened. After any other error the
    session may hold the locks nevertheless; see ``free_after_error``.
    """
    if request.timeout == 0:
        return granted((yield comment(request.keys) + try_statement(request)))
    statement = in_savepoint(wait_for_all(request._replace(max_hold=None), "pg_advisory_lock")) if in_test else None
    try:
        return (yield comment(request.keys) + (statement or _wait_statement(request))) or (True,)
    except (DjangoFailure, PsycopgFailure) as error:
        if in_test:
            # This waits for the session lock itself, because a transaction lock would stay until the end of the test.
            # So the lock may have been granted at the moment at which its timeout was reported.
            yield from _back_to_savepoint_without(request)
        _raise_if_timeout(error, request)
        raise


def try_statement(request: Request) -> str:
    """Return the statement that takes session locks, or none of them, without a wait."""
    if len(request.keys) > 1:
        statement = _try_all(request)
    else:
        statement = f"SELECT {_in_mode('pg_try_advisory_lock', request)}({request.keys[0].number})"
    if request.max_hold is not None:
        before, limit = _limit_session(request)
        # CASE, so that a session that does not get the lock keeps its settings.
        columns = f"granted, {before}, CASE WHEN granted THEN ROW({limit}) END"
        statement = f"SELECT {columns} FROM ({statement} OFFSET 0) AS asked (granted)"
    return statement


def unless_awaited(request: Request, statement: str) -> str:
    """Return the statement that takes locks of which this session has some, unless another session waits for one.

    PostgreSQL grants a session again what it has, without a look at those that wait. They would never get the lock
    while coroutines share it one after the other.
    """
    return (
        f"SELECT CASE WHEN EXISTS (SELECT FROM {_keys_in_order(request)} JOIN pg_locks "
        "ON locktype = 'advisory' AND objsubid = 1 AND NOT granted AND (classid::bigint << 32) | objid::bigint = k "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())) "
        f"THEN false ELSE ({statement}) END"
    )


def _try_all(request: Request) -> str:
    """Return the statement that takes the free locks, and frees them again if some locks are not free.

    It is one statement, so that other sessions find only some of the locks taken for as short a time as possible.
    """
    attempt, undo = _in_mode("pg_try_advisory_lock", request), _in_mode("pg_advisory_unlock", request)
    return (
        f"SELECT granted FROM (WITH got AS MATERIALIZED (SELECT k, {attempt}(k) AS ok FROM {_keys_in_order(request)}), "
        "verdict AS MATERIALIZED (SELECT bool_and(ok) AS granted FROM got) "
        f"SELECT granted, (SELECT count({undo}(k)) FROM got WHERE ok AND NOT granted) FROM verdict OFFSET 0) AS tried"
    )


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
    taken = _call_for_each("pg_advisory_lock", request)
    if request.max_hold is not None:
        before, limit = _limit_session(request)
        taken += f";SELECT true, {before}, {limit}"
    if request.timeout is None:
        return f"SET LOCAL lock_timeout = 0;{taken}"
    limits = f"SET LOCAL lock_timeout = {request.wait};SET LOCAL statement_timeout = 0"
    if len(request.keys) == 1:
        waiting = _call_for_each("pg_advisory_xact_lock", request)
    else:
        waiting = wait_for_all(request._replace(max_hold=None), "pg_advisory_xact_lock")
    return f"{limits};{waiting};{taken}"


def _back_to_savepoint_without(request: Request) -> Steps:
    """Roll back to the savepoint before the wait, so that the transaction is usable, and free locks that were taken."""
    try:
        yield BACK_TO_SAVEPOINT
        yield free_if_held_statement(request)
    except BaseException:  # noqa: BLE001 - the first error is raised
        yield END_SESSION
    return None


def free_statement(request: Request, limits: Sequence[str] = ()) -> str:
    """Return the statement that frees each session lock once. Its only column says whether the session held all.

    ``limits`` are the idle limits to restore, from the answer of the acquire.
    """
    if len(request.keys) == 1 and not limits:
        return _call_for_each("pg_advisory_unlock", request)
    restored = [f"{restore_limit(*each)} IS NOT NULL AND " for each in zip(IDLE_LIMITS, limits, strict=False)]
    unlock = _in_mode("pg_advisory_unlock", request)
    return f"SELECT {''.join(restored)}bool_and({unlock}(k)) FROM {_keys_in_order(request)}"


def free_if_held_statement(request: Request) -> str:
    """Return the statement that frees session locks if this session holds them after an error.

    A session that already held a lock does not wait for it. So a lock that is found here was taken by this request.
    """
    return f"SELECT {_in_mode('pg_advisory_unlock', request)}(k) {_held_keys(request)}"


# Transaction locks: freed by PostgreSQL with COMMIT, ROLLBACK, or a rollback to a savepoint before the lock


def acquire_transaction_locks(request: Request) -> Steps:
    """Acquire transaction locks inside a transaction: all of them, or none.

    Raises ``Busy`` and ``StaleSnapshot``. Then nothing is held, and the transaction is usable.
    """
    # A free lock needs neither a savepoint nor a time limit. Several locks are not tried one by one, because a
    # transaction lock cannot be freed before the end.
    if len(request.keys) == 1:
        tried = _fresh((yield comment(request.keys) + _try_in_transaction(request)))
        if tried[0] or request.timeout == 0:
            return granted(tried)
    statement = wait_for_all(request, "pg_advisory_xact_lock", condition=_fresh_condition(request))
    try:
        row = yield comment(request.keys) + (statement if request.timeout is None else in_savepoint(statement))
    except (DjangoFailure, PsycopgFailure) as error:
        try:
            _raise_if_timeout(error, request)
        except Busy:
            yield BACK_TO_SAVEPOINT
            raise
        raise
    # An execute wrapper that reads results may have skipped the row, because it is not that of the last statement.
    return _fresh(row if row is not None else (yield f"SELECT nullif({_fresh_condition(request)}, false)"))


def _fresh_condition(request: Request) -> str:
    """Return the condition under which a transaction sees the committed changes of the last holder of the lock.

    Only the server knows the isolation level, because role, database, OPTIONS and SET TRANSACTION can set it. Above
    READ COMMITTED, the statement that waits takes the transaction's snapshot before it waits:
    https://www.postgresql.org/docs/current/transaction-iso.html.
    """
    return "true" if request.stale_ok else "starts_with(current_setting('transaction_isolation'), 'read ')"


def _try_in_transaction(request: Request) -> str:
    """Return the statement that answers whether the lock was granted, or NULL if it would not protect."""
    statement = f"{_in_mode('pg_try_advisory_xact_lock', request)}({request.keys[0].number})"
    if not request.stale_ok:
        statement = f"CASE WHEN {_fresh_condition(request)} THEN {statement} END"
    if request.max_hold is not None:
        limit = f"CASE WHEN granted THEN {_limit_transaction(request)} END"
        return f"SELECT granted, {limit} FROM (SELECT {statement} AS granted OFFSET 0) AS asked"
    return f"SELECT {statement}"


# Semaphores: a holder has one of several locks, the slots. PostgreSQL cannot wait for one of several locks. So all
# waiters queue for one other lock, and are served in the order of their arrival. Only the waiter that has it polls for
# a free slot.


def acquire_slot(request: Request, scope: str, *, inside: bool = False) -> Steps:
    """Acquire one lock of several. The first column of the row is its number.

    ``inside``: within a transaction. Raises ``Busy`` and ``StaleSnapshot``. Then nothing is held.
    """
    function = "pg_try_advisory_lock" if scope == "session" else "pg_try_advisory_xact_lock"
    if request.timeout == 0:
        return granted((yield comment(request.keys) + try_slot_statement(request, function, inside=inside)))
    names = comment((_queue_of(request), *request.keys))
    try:
        row = yield names + (_wait_inside if inside else _wait_for_slot)(request, function)
    except (DjangoFailure, PsycopgFailure) as error:
        if inside:
            yield from _back_to_savepoint_without(request._replace(keys=(_queue_of(request),)))
        _raise_if_timeout(error, request)
        raise
    if inside and row is None:
        # An execute wrapper may have skipped the row. Query which slot the session has.
        row = yield f"SELECT k, true {_held_keys(request)} LIMIT 1"
    if inside and row is not None and row[1] is None:
        raise StaleSnapshot
    return granted(row)


def _queue_of(request: Request) -> Key:
    assert request.queue is not None  # noqa: S101 - it is a semaphore's
    return request.queue


def try_slot_statement(request: Request, function: str = "pg_try_advisory_lock", *, inside: bool = False) -> str:
    """Return the statement that takes a free slot if no waiter queues. Inside a transaction the queue is not read."""
    # No ORDER BY, because a sort would try all slots.
    slots = f"SELECT k FROM {_keys_in_order(request)} WHERE {{}}{function}(k) LIMIT 1"
    if inside:
        return slots.format("")
    # A shared lock, so that sessions that only check do not exclude each other. It ends with the statement.
    first = f"SELECT pg_try_advisory_xact_lock_shared({_queue_of(request).number}) AS is_first OFFSET 0"
    return f"SELECT slot.k FROM ({first}) AS queue, LATERAL ({slots.format('is_first AND ')}) AS slot"


def _wait_for_slot(request: Request, function: str) -> str:
    """Return the message that waits in autocommit. The queue's lock ends with it: it is one implicit transaction."""
    limit = f"SET LOCAL lock_timeout = {request.wait or 0}"
    if request.timeout is not None:
        limit += ";SET LOCAL statement_timeout = 0"
    return f"{limit};SELECT pg_advisory_xact_lock({_queue_of(request).number});{look_for_slot(request, function)}"


def _wait_inside(request: Request, function: str) -> str:
    """Return the message that waits inside a transaction.

    The queue's lock is a session lock, because a transaction lock would last to the commit.
    """
    is_fresh = _fresh_condition(request)
    queue = _queue_of(request)
    waiting = wait_for_all(request._replace(keys=(queue,), max_hold=None), "pg_advisory_lock", condition=is_fresh)
    found = f"SELECT ({look_for_slot(request, function)}) AS slot, {is_fresh} AS is_fresh OFFSET 0"
    leaving = f"CASE WHEN is_fresh THEN pg_advisory_unlock({queue.number}) END"
    return in_savepoint(f"{waiting};SELECT slot, nullif(is_fresh, false), {leaving} FROM ({found}) AS found")


def look_for_slot(request: Request, function: str) -> str:
    """Return one statement that polls for a free slot in the server.

    A statement for each poll would need a round trip each. A wait for one slot with a time limit would write an error
    into the server's log each time that the limit is reached. The polls are counted, because the server's clock may be
    put back meanwhile.
    """
    fresh = _fresh_condition(request) if "xact" in function else "true"
    slots = f"SELECT k FROM {_keys_in_order(request)} WHERE {{}} AND {function}(k) LIMIT 1"
    end = ""
    if request.timeout is not None:
        end = f"clock_timestamp() < statement_timestamp() + '{request.wait} ms' AND "
        end += f"polls <= {math.ceil(request.timeout / SEMAPHORE_POLL)} AND "
    return (
        f"WITH RECURSIVE look (slot, polls) AS (SELECT ({slots.format(fresh)}), 1 UNION ALL "
        f"SELECT ({slots.format('look.slot IS NULL')}), polls + 1 FROM look "
        f"WHERE look.slot IS NULL AND {fresh} AND {end}pg_sleep({SEMAPHORE_POLL}) IS NOT NULL) "
        "SELECT slot FROM look WHERE slot IS NOT NULL"
    )
