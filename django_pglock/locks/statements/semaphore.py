"""Semaphores: a holder has one of several locks, the slots. Waiters are served in the order of their arrival.

PostgreSQL cannot wait for one of several locks. So all waiters queue for one other lock, and only the waiter that has
it polls for a free slot.
"""

from __future__ import annotations

import math

from django.db import Error as DjangoFailure
from psycopg import Error as PsycopgFailure

from django_pglock.keys import Key
from django_pglock.locks.options import Request
from django_pglock.locks.statements.fragments import comment, held_keys, keys_in_order
from django_pglock.locks.statements.session_scope import back_to_savepoint_without
from django_pglock.locks.statements.steps import StaleSnapshot, Steps, granted
from django_pglock.locks.statements.timeouts import in_savepoint, raise_if_timeout, wait
from django_pglock.locks.statements.transaction_scope import fresh_condition

#: Seconds between two polls for a free slot by the first in the queue.
SEMAPHORE_POLL = 0.02


def acquire_slot(request: Request, scope: str, queue: Key, *, inside: bool = False) -> Steps:
    """Acquire one lock of several. The first column of the row is its number.

    ``queue`` is the lock for which all waiters queue. ``inside``: within a transaction. Raises ``Busy`` and
    ``StaleSnapshot``. Then nothing is held.
    """
    function = "pg_try_advisory_lock" if scope == "session" else "pg_try_advisory_xact_lock"
    if request.wait == 0:
        return _try(request, function, None if inside else queue)
    return _wait_inside(request, function, queue) if inside else _wait(request, function, queue)


def _try(request: Request, function: str, queue: Key | None) -> Steps:
    """Acquire a free slot, if the queue has no waiters. Inside a transaction the queue is not checked."""
    # No ORDER BY, because a sort would try all slots.
    slots = f"SELECT k FROM {keys_in_order(request)} WHERE {function}(k) LIMIT 1"
    if queue is not None:
        # A shared lock, so that sessions that only check do not exclude each other. It ends with the statement.
        first = f"SELECT pg_try_advisory_xact_lock_shared({queue.number}) AS is_first OFFSET 0"
        slots = slots.replace("WHERE", "WHERE is_first AND")
        slots = f"SELECT slot.k FROM ({first}) AS queue, LATERAL ({slots}) AS slot"
    return granted((yield comment(request.keys) + slots))


def _wait(request: Request, function: str, queue: Key) -> Steps:
    """Wait in autocommit. The queue's lock ends with the message, which is one implicit transaction."""
    limit = f"SET LOCAL lock_timeout = {request.wait or 0}"
    if request.wait is not None:
        limit += ";SET LOCAL statement_timeout = 0"
    waiting = f"SELECT pg_advisory_xact_lock({queue.number})"
    looking = _look_for_slot(request, function)
    try:
        return granted((yield f"{comment((queue, *request.keys))}{limit};{waiting};{looking}"))
    except (DjangoFailure, PsycopgFailure) as error:
        raise_if_timeout(error, request)
        raise


def _wait_inside(request: Request, function: str, queue: Key) -> Steps:
    """Wait inside a transaction. The queue's lock is a session lock: a transaction lock would last to the commit."""
    try:
        row = yield _wait_inside_statement(request, function, queue)
    except (DjangoFailure, PsycopgFailure) as error:
        yield from back_to_savepoint_without(request._replace(keys=(queue,), shared=False))
        raise_if_timeout(error, request)
        raise
    if row is None:
        # An execute wrapper may have skipped the row. Query which slot the session has.
        row = yield f"SELECT k, true {held_keys(request)} LIMIT 1"
    if row is not None and row[1] is None:
        raise StaleSnapshot
    return granted(row)


def _wait_inside_statement(request: Request, function: str, queue: Key) -> str:
    is_fresh = fresh_condition(request)
    waiting = wait(request._replace(keys=(queue,), max_hold=None), "pg_advisory_lock", condition=is_fresh)
    found = f"SELECT ({_look_for_slot(request, function)}) AS slot, {is_fresh} AS is_fresh OFFSET 0"
    leaving = f"CASE WHEN is_fresh THEN pg_advisory_unlock({queue.number}) END"
    looking = f"SELECT slot, nullif(is_fresh, false), {leaving} FROM ({found}) AS found"
    return comment((queue, *request.keys)) + in_savepoint(f"{waiting};{looking}")


def _look_for_slot(request: Request, function: str) -> str:
    """Return one statement that polls for a free slot in the server.

    A statement for each poll would need a round trip each. A wait for one slot with a time limit would write an error
    into the server's log each time that the limit is reached. The polls are counted, because the server's clock may be
    put back meanwhile.
    """
    fresh = fresh_condition(request) if "xact" in function else "true"
    slots = f"SELECT k FROM {keys_in_order(request)} WHERE {{}} AND {function}(k) LIMIT 1"
    end = ""
    if request.wait is not None:
        end = f"clock_timestamp() < statement_timestamp() + '{request.wait} ms' AND "
        end += f"polls <= {math.ceil(request.wait / 1000 / SEMAPHORE_POLL)} AND "
    return (
        f"WITH RECURSIVE look (slot, polls) AS (SELECT ({slots.format(fresh)}), 1 UNION ALL "
        f"SELECT ({slots.format('look.slot IS NULL')}), polls + 1 FROM look "
        f"WHERE look.slot IS NULL AND {fresh} AND {end}pg_sleep({SEMAPHORE_POLL}) IS NOT NULL) "
        "SELECT slot FROM look WHERE slot IS NOT NULL"
    )
