"""Why the session of an atomic function has ended: by the function itself or its slowness, or by an outage."""

from __future__ import annotations

from typing import Any

from django.db.transaction import TransactionManagementError
from psycopg.errors import IdleInTransactionSessionTimeout

from django_pglock.postgres.connections import sqlstates_of

#: The limits on a transaction by which the server ends a session. psycopg 3.2.0 has no class for the second one.
LIMITS = {
    IdleInTransactionSessionTimeout.sqlstate: "idle_in_transaction_session_timeout",
    "25P04": "transaction_timeout",
}


def has_been_closed(connection: Any, session: Any) -> bool:
    """Say whether the function has closed its session, through Django or through psycopg, while it was in order.

    Call it before ``atomic()`` ends, because that may close the session as well. ``broken`` of psycopg is true for a
    session that was lost before it was closed, and for the sessions that this package ends: see ``end_session``. A
    session of a pool that was closed through Django may be open, and back in the pool.
    """
    return bool((connection.closed_in_transaction or session.closed) and not session.broken)


def fault_of_function(error: BaseException, session: Any, *, is_closed: bool) -> TransactionManagementError | None:
    """Return the error to record if the function has ended its session; None if it was an outage.

    ``session`` is the psycopg connection of the attempt, None if there was none yet. ``is_closed`` is the answer of
    ``has_been_closed``. A repetition would end in the same way each time, so it has to count as an attempt.
    """
    # A session to another database may have met its limit, too. Then this one is open.
    has_ended = session is not None and session.closed
    limit = next((LIMITS[each] for each in sqlstates_of(error) if each in LIMITS), None)
    if has_ended and limit is not None:
        text = (
            f"The server has ended the session of this atomic task by its limit {limit}, and rolled its transaction "
            f"back. Shorten the transaction, for example by slow calls before it or in another task, or raise {limit} "
            "for the role of the workers."
        )
    elif is_closed:
        text = (
            "This atomic task has closed its database connection, and so its transaction was rolled back. Do not call "
            "connection.close() or connections.close_all() in an atomic function; the worker renews its connections."
        )
    else:
        return None
    fault = TransactionManagementError(text)
    fault.__cause__ = error
    return fault
