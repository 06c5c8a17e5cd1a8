"""One exchange with the server, directly by libpq. It does only what a lock needs.

psycopg's cursor binds parameters, stores results, and loads types. A lock statement has no parameters, and its answer
is a boolean. Without the cursor it takes half the time. This module uses only documented functions: ``psycopg.pq``, and
libpq's "Asynchronous Command Processing", https://www.postgresql.org/docs/current/libpq-async.html.

Threads and coroutines send and read the same data. They differ only in how they wait for the socket.
"""

from __future__ import annotations

import asyncio
import math
import select
import time
from typing import TYPE_CHECKING, Any

from psycopg import Error as PsycopgError
from psycopg import IsolationLevel, OperationalError
from psycopg.errors import lookup
from psycopg.pq import DiagnosticField, ExecStatus, PipelineStatus, TransactionStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from psycopg import Connection
    from psycopg.pq.abc import PGconn, PGresult

#: The numbers, in pg_type, of the types whose values are converted.
BOOL, BIGINT, DOUBLE = 16, 20, 701
#: Seconds for the cancel request to reach the server, and then for the end of the answer.
CANCEL_WITHIN = 5.0
#: Milliseconds between two moments in which Python may run signal handlers.
SIGNAL_CHECK_INTERVAL = 100
#: Seconds after which a coroutine tries again to use a connection that another thread uses for a moment.
RETRY_AFTER = 0.001
CAN_EXCHANGE = hasattr(select, "poll")
BEGIN: dict[IsolationLevel | None, str] = {None: "BEGIN;"}
BEGIN |= {level: f"BEGIN ISOLATION LEVEL {level.name.replace('_', ' ')};" for level in IsolationLevel}
_BAD = (ExecStatus.FATAL_ERROR, ExecStatus.BAD_RESPONSE)


def begin_for(raw: Connection[Any]) -> str | None:
    """Return the text before the next statement: an empty text, or the BEGIN that psycopg would send.

    None: this BEGIN has more options than an isolation level, so psycopg must send it.
    """
    if raw.autocommit or raw.pgconn.transaction_status != TransactionStatus.IDLE:
        return ""
    return BEGIN[raw.isolation_level] if raw.read_only is None and raw.deferrable is None else None


def can_send(raw: Connection[Any]) -> bool:
    """Return whether a statement could be sent now: no statement is running, and no transaction is aborted."""
    pgconn = raw.pgconn
    return (
        pgconn.transaction_status in (TransactionStatus.IDLE, TransactionStatus.INTRANS)
        and pgconn.pipeline_status == PipelineStatus.OFF
    )


def exchange(raw: Connection[Any], statements: str) -> list[Any] | None:
    """Send statements in one message. Return the first row of the last answer that has rows, or None.

    Raises psycopg's errors. If a Python exception interrupts the exchange, such as Ctrl-C, the statement is cancelled,
    so that the connection stays usable. Then the exception is raised.
    """
    with raw.lock:
        return exchange_locked(raw, statements)


def if_unused(raw: Connection[Any], use: Callable[[], object]) -> bool:
    """Call ``use`` with the connection's lock held, if the connection is unused now. Return whether it was called.

    For another thread, or for a destructor that Python runs in the middle of psycopg's own code. There, a wait for the
    connection could be a deadlock of the thread with itself.
    """
    if not raw.lock.acquire(blocking=False):
        return False
    try:
        if not can_send(raw):
            return False
        use()
        return True
    finally:
        raw.lock.release()


def exchange_locked(raw: Connection[Any], statements: str) -> list[Any] | None:
    """Do the same as ``exchange``, for a caller that holds the connection's lock."""
    pgconn = raw.pgconn
    try:
        pgconn.send_query(statements.encode())
        results = _results(pgconn)
    except OperationalError:
        raise
    except BaseException:
        _cancel(raw)
        raise
    return _row_of(pgconn, results)


def _results(pgconn: PGconn, within: float = math.inf) -> list[PGresult]:
    """Wait for the results of all statements of a message, ``within`` seconds at most."""
    results: list[PGresult] = []
    deadline = time.monotonic() + within
    is_unsent = pgconn.flush()
    poll = select.poll()
    poll.register(pgconn.socket, select.POLLIN | select.POLLOUT if is_unsent else select.POLLIN)
    while not _collect_results(pgconn, results):
        # The poll ends from time to time, so that Python can run the handlers of signals that another thread got.
        if not poll.poll(SIGNAL_CHECK_INTERVAL) and time.monotonic() > deadline:
            raise OperationalError(f"the server has not answered within {within:g} s")
        _consume_input(pgconn, results)
        if is_unsent and not (is_unsent := pgconn.flush()):
            poll.modify(pgconn.socket, select.POLLIN)
    return results


def _consume_input(pgconn: PGconn, results: list[PGresult]) -> None:
    """Read the data that has arrived. If the session has ended, the server's last error is the cause of our error."""
    try:
        pgconn.consume_input()
    except OperationalError as lost:
        _collect_results(pgconn, results)
        raise lost from _reported_error(results)


def _reported_error(results: list[PGresult]) -> Exception | None:
    """Return the server's error among some results; errors that libpq itself makes are ignored."""
    errors = (each for each in results if each.status in _BAD and each.error_field(DiagnosticField.SQLSTATE))
    return next(map(_error, errors), None)


def _collect_results(pgconn: PGconn, results: list[PGresult]) -> bool:
    """Add the results that have arrived. Return whether all have arrived."""
    while not pgconn.is_busy():
        result = pgconn.get_result()
        if result is None:
            return True
        results.append(result)
    return False


def _cancel(raw: Connection[Any]) -> None:
    """Cancel the running statement. If this fails, end the session instead of waiting."""
    try:
        if raw.pgconn.transaction_status == TransactionStatus.ACTIVE:
            raw.cancel_safe(timeout=CANCEL_WITHIN)
            _results(raw.pgconn, CANCEL_WITHIN)
    except PsycopgError:
        raw.pgconn.finish()


async def exchange_async(raw: Connection[Any], statements: str) -> list[Any] | None:
    """Do the same for a coroutine. No other code may use this connection. A cancel also cancels the statement."""
    while not raw.lock.acquire(blocking=False):
        await asyncio.sleep(RETRY_AFTER)
    try:
        pgconn = raw.pgconn
        try:
            pgconn.send_query(statements.encode())
            results = await _results_async(pgconn)
        except OperationalError:
            raise
        except BaseException:
            await _cancelled(asyncio.ensure_future(_cancel_async(raw)))
            raise
        return _row_of(pgconn, results)
    finally:
        raw.lock.release()


async def _results_async(pgconn: PGconn) -> list[PGresult]:
    results: list[PGresult] = []
    while pgconn.flush():
        await wait_for_socket(pgconn.socket, to_write=True)
    while not _collect_results(pgconn, results):
        await wait_for_socket(pgconn.socket)
        _consume_input(pgconn, results)
    return results


async def _cancelled(cancelling: asyncio.Future[None]) -> None:
    """Wait for the end of the cancel. If the coroutine is cancelled again, it does not wait, and the session ends."""
    try:
        await asyncio.shield(cancelling)
    except asyncio.CancelledError:
        cancelling.cancel()
        raise


async def _cancel_async(raw: Connection[Any]) -> None:
    try:
        if raw.pgconn.transaction_status == TransactionStatus.ACTIVE:
            await asyncio.to_thread(raw.cancel_safe, timeout=CANCEL_WITHIN)
            await asyncio.wait_for(_results_async(raw.pgconn), CANCEL_WITHIN)
    except (PsycopgError, RuntimeError, asyncio.CancelledError, asyncio.TimeoutError):
        # RuntimeError: the loop ends, and starts no more threads. TimeoutError: the connection may be half open.
        raw.pgconn.finish()


async def wait_for_socket(number: int, *, to_write: bool = False) -> None:
    """Wait until a socket is readable or writable."""
    loop = asyncio.get_running_loop()
    is_ready = loop.create_future()

    def set_ready() -> None:
        if not is_ready.done():
            is_ready.set_result(None)

    add, remove = (loop.add_writer, loop.remove_writer) if to_write else (loop.add_reader, loop.remove_reader)
    add(number, set_ready)
    try:
        await is_ready
    finally:
        remove(number)


def _row_of(pgconn: PGconn, results: list[PGresult]) -> list[Any] | None:
    """Return the first row of the last result that has rows. If the last result is an error, raise it."""
    if not results:
        raise OperationalError("the connection was closed before the server answered")
    pass_on_notifications(pgconn)
    if results[-1].status in _BAD:
        error: Any = _error(results[-1])
        # How many statements of the message were accepted before.
        error.accepted = len(results) - 1
        raise error from _reported_error(results[:-1])
    for result in reversed(results):
        if result.status == ExecStatus.TUPLES_OK:
            return [_value(result, column) for column in range(result.nfields)] if result.ntuples else None
    return None


def pass_on_notifications(pgconn: PGconn) -> None:
    """Pass notifications that have arrived to psycopg's handlers, as psycopg itself does."""
    while notification := pgconn.notifies():
        if pgconn.notify_handler:
            pgconn.notify_handler(notification)


def _error(result: PGresult) -> Exception:
    state = (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()
    text = result.error_message.decode(errors="replace").strip()
    message = text.partition(":  ")[2] or text  # without the severity, as psycopg has it
    try:
        kind = lookup(state)
    except KeyError:
        kind = OperationalError
    return kind(message, info=result)


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
