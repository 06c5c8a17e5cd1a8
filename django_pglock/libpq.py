"""One exchange with the server, straight through libpq: what a lock needs, and nothing else.

psycopg's cursor binds parameters, keeps results, loads types. A lock statement has no parameters and answers with a
boolean; done here, that takes half the time. What is used is documented: ``psycopg.pq``, and libpq's "Asynchronous
Command Processing", https://www.postgresql.org/docs/current/libpq-async.html.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Any

from psycopg import Error as PsycopgError
from psycopg import OperationalError
from psycopg.errors import lookup
from psycopg.pq import DiagnosticField, ExecStatus, TransactionStatus

if TYPE_CHECKING:
    from psycopg import Connection
    from psycopg.pq.abc import PGconn, PGresult

#: pg_type's numbers of the types that are more than text here.
BOOL, BIGINT, DOUBLE = 16, 20, 701
#: Seconds for the server to hear of a cancel.
CANCEL_WITHIN = 5.0
#: Milliseconds.
LOOK_UP = 100
CAN_EXCHANGE = hasattr(select, "poll")
_BAD = (ExecStatus.FATAL_ERROR, ExecStatus.BAD_RESPONSE)


def begin_for(raw: Connection[Any]) -> str | None:
    """Return what has to come before the next statement: nothing, or the BEGIN that psycopg would send.

    None, if that is more than BEGIN alone: then psycopg has to send it.
    """
    if raw.autocommit or raw.pgconn.transaction_status != TransactionStatus.IDLE:
        return ""
    is_plain = raw.isolation_level is None and raw.read_only is None and raw.deferrable is None
    return "BEGIN;" if is_plain else None


def exchange(raw: Connection[Any], statements: str) -> list[Any] | None:
    """Send statements in one message and return the first row of the last answer, or None if it has none.

    Raises psycopg's errors. A Python exception in between, such as Ctrl-C, has the statement cancelled before it goes
    on, so that the connection is usable.
    """
    with raw.lock:
        pgconn = raw.pgconn
        pgconn.send_query(statements.encode())
        try:
            result = _last_answer(pgconn)
        except OperationalError:
            raise
        except BaseException:
            _cancel(raw)
            raise
    if result is None:
        raise OperationalError("the connection was closed before the answer came")
    if result.status in _BAD:
        raise _error(result)
    return _first_row(result)


def _last_answer(pgconn: PGconn) -> PGresult | None:
    """Wait for the end of the answer and return its last part, which is the error if there was one."""
    poll = select.poll()
    poll.register(pgconn.socket, select.POLLIN | select.POLLOUT if pgconn.flush() else select.POLLIN)
    last = None
    while True:
        while pgconn.is_busy():
            # From time to time Python has a look for signals that another thread was interrupted by.
            poll.poll(LOOK_UP)
            pgconn.consume_input()
            if not pgconn.flush():
                poll.modify(pgconn.socket, select.POLLIN)
        result = pgconn.get_result()
        if result is None:
            return last
        last = result


def _cancel(raw: Connection[Any]) -> None:
    """Have the statement under way cancelled; if that cannot be done, end the session rather than wait for it."""
    try:
        raw.cancel_safe(timeout=CANCEL_WITHIN)
        _last_answer(raw.pgconn)
    except PsycopgError:
        raw.close()


def _error(result: PGresult) -> Exception:
    state = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()
    text = result.error_message.decode(errors="replace").strip()
    message = text.partition(":  ")[2] or text  # without the severity, as psycopg has it
    try:
        kind = lookup(state)
    except KeyError:
        kind = OperationalError
    return kind(message, info=result)


def _first_row(result: PGresult) -> list[Any] | None:
    if result.status != ExecStatus.TUPLES_OK or not result.ntuples:
        return None
    return [_value(result, column) for column in range(result.nfields)]


def _value(result: PGresult, column: int) -> Any:
    value = result.get_value(0, column)
    if value is None:
        return None
    kind = result.ftype(column)
    if kind == BIGINT:
        return int(value)
    if kind == DOUBLE:
        return float(value)
    return value == b"t" if kind == BOOL else value.decode()
