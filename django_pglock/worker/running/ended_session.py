"""Why the session of an atomic function has ended: by the function itself or its slowness, or by an outage.

Some ends can have both reasons. Then the task is a suspect, and the server says more (``ServerTimes`` in rescue.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, NamedTuple

from django.db.transaction import TransactionManagementError
from psycopg.errors import CannotConnectNow, CrashShutdown, IdleInTransactionSessionTimeout

from django_pglock.postgres.connections import sqlstates_of


class Limit(NamedTuple):
    """A limit on a transaction by which the server ends a session: its name, and what the server says in English."""

    name: str
    says: str


#: The limits by SQLSTATE. psycopg 3.2.0 has no class for the second one.
LIMITS = {
    IdleInTransactionSessionTimeout.sqlstate: Limit(
        "idle_in_transaction_session_timeout", "terminating connection due to idle-in-transaction timeout"
    ),
    "25P04": Limit("transaction_timeout", "terminating connection due to transaction timeout"),
}


#: The server ends a session with these codes because another session has crashed, or because it stops.
ENDED_BY_OTHERS = (CrashShutdown.sqlstate, CannotConnectNow.sqlstate)


@contextmanager
def codes_of_notices(session: Any) -> Iterator[list[str | None]]:
    """Yield a list to which the codes of the server's notices on this psycopg connection are added.

    If one session crashes, the server tells all others by a notice. The one that has crashed gets none.
    """
    codes: list[str | None] = []

    def note(diagnostic: Any) -> None:
        codes.append(diagnostic.sqlstate)

    # Some pools lend another object, which has no attributes after its return. The function may remove all handlers.
    with suppress(AttributeError):
        session.add_notice_handler(note)
    try:
        yield codes
    finally:
        with suppress(AttributeError, ValueError):
            session.remove_notice_handler(note)


def may_be_own_end(error: BaseException, notices: Iterable[str | None]) -> bool:
    """Return whether the task may have ended its session. Not if the server or a pooler says that others did."""
    codes = filter(None, [*sqlstates_of(error), *notices])
    return not any(code in ENDED_BY_OTHERS or code.startswith("08") for code in codes)


class SessionAfterCall(NamedTuple):
    """What is known of the session right after the function, before ``atomic()`` or a statement of ours changes it."""

    #: The function has closed the session, through Django or through psycopg, while it was in order.
    is_closed: bool = False
    #: The message of libpq's last exchange on the session, if the session has ended.
    last_message: str = ""

    @classmethod
    def of(cls, connection: Any, session: Any) -> SessionAfterCall:
        """Look at the psycopg connection ``session``, which Django's ``connection`` had before the call.

        ``broken`` of psycopg is true for a session that was lost before it was closed, and for the sessions that this
        package ends: see ``end_session``. A session of a pool that was closed through Django may be open, and back in
        the pool.
        """
        if session.broken:
            return cls(False, session.pgconn.error_message.decode(errors="replace"))
        return cls(bool(connection.closed_in_transaction or session.closed))


def error_if_function_ended_session(
    error: BaseException, session: Any, after_call: SessionAfterCall
) -> TransactionManagementError | None:
    """Return the error to record if the function has ended its session; None if it was an outage.

    ``session`` is the psycopg connection of the attempt, None if there was none yet. A repetition would end in the same
    way each time, so it has to count as an attempt.
    """
    # A session to another database may have met its limit, too. Then this one is open.
    has_ended = session is not None and session.closed
    limit = _limit_met(error, after_call.last_message) if has_ended else None
    if limit is not None:
        text = (
            f"The server has ended the session of this atomic task by its limit {limit}, and rolled its transaction "
            f"back. Shorten the transaction, for example by slow calls before it or in another task, or raise {limit} "
            "for the role of the workers."
        )
    elif after_call.is_closed:
        text = (
            "This atomic task has closed its database connection, and so its transaction was rolled back. Do not call "
            "connection.close() or connections.close_all() in an atomic function; the worker renews its connections."
        )
    else:
        return None
    fault = TransactionManagementError(text)
    fault.__cause__ = error
    return fault


def _limit_met(error: BaseException, last_message: str) -> str | None:
    """Return the name of the limit by which the server has ended the session; None if it was no limit.

    If the function has caught the server's error, only libpq's message is left. That has no SQLSTATE, and is in the
    language of the server.
    """
    found = (LIMITS[each] for each in sqlstates_of(error) if each in LIMITS)
    said = (each for each in LIMITS.values() if each.says in last_message)
    return next((limit.name for limit in chain(found, said)), None)
