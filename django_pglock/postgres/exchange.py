"""One exchange with the server, by psycopg's own generators. It does only what a lock needs.

psycopg's cursor binds parameters, stores results, and loads types. A lock statement has no parameters, and its answer
is a boolean. Without the cursor it takes a fifth of the time. The generators send and receive for psycopg's cursors,
and yield what they wait for. Threads and coroutines run the same ones, and differ only in how they wait for the socket.
psycopg does not document them, so they are used only here. ``tests/db/postgres/test_exchange.py`` holds each supported
psycopg to what is used here. With a psycopg that does not have them, statements go through Django's cursor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from selectors import DefaultSelector
from typing import TYPE_CHECKING, Any, TypeVar

from psycopg import Error as PsycopgError
from psycopg import OperationalError, generators, waiting
from psycopg.errors import error_from_result
from psycopg.pq import DiagnosticField, ExecStatus, PipelineStatus, TransactionStatus
from psycopg.waiting import Ready, Wait

if TYPE_CHECKING:
    from psycopg import Connection
    from psycopg.abc import PQGen
    from psycopg.pq.abc import PGconn, PGresult

#: The numbers, in pg_type, of the types whose values are converted: boolean, bigint, double precision.
LOADERS: dict[int, Callable[[bytes], Any]] = {16: b"t".__eq__, 20: int, 701: float}
#: Seconds for the cancel request to reach the server, and then for the end of the answer.
CANCEL_WITHIN = 5.0
#: Seconds between two moments in which Python may run signal handlers.
SIGNAL_CHECK_INTERVAL = 0.1
#: Seconds after which a coroutine tries again to use a connection that another thread uses for a moment.
RETRY_AFTER = 0.001
#: Whether psycopg has the generators that are used here.
HAS_GENERATORS = hasattr(generators, "send") and hasattr(generators, "fetch")
_BAD = (ExecStatus.FATAL_ERROR, ExecStatus.BAD_RESPONSE)

Row = list[Any]
T = TypeVar("T")


def begin_for(raw: Connection[Any]) -> str:
    """Return the text before the next statement: an empty text, or the BEGIN that psycopg would send."""
    if raw.autocommit or raw.pgconn.transaction_status != TransactionStatus.IDLE:
        return ""
    return raw._get_tx_start_command().decode() + ";"  # noqa: SLF001 - it knows all options of the connection


def exchange(raw: Connection[Any], statements: str) -> Row | None:
    """Send statements in one message. Return the first row of the last answer that has rows, or None.

    Raises psycopg's errors. ``accepted`` of an error is the number of the statements before the one that was refused.
    If a Python exception interrupts the exchange, such as Ctrl-C, the statement is cancelled, so that the connection
    stays usable. Then the exception is raised.
    """
    with raw.lock:
        return exchange_locked(raw, statements, begin_for(raw))


def if_unused(raw: Connection[Any], use: Callable[[], object]) -> bool:
    """Call ``use`` with the connection's lock held, if the connection is unused now. Return whether it was called.

    For another thread, or for a destructor that Python runs in the middle of psycopg's own code. There, a wait for the
    connection could be a deadlock of the thread with itself.
    """
    if not raw.lock.acquire(blocking=False):
        return False
    try:
        pgconn = raw.pgconn
        if pgconn.transaction_status not in (TransactionStatus.IDLE, TransactionStatus.INTRANS):
            return False
        if pgconn.pipeline_status != PipelineStatus.OFF:
            return False
        use()
        return True
    finally:
        raw.lock.release()


def exchange_locked(raw: Connection[Any], statements: str, begin: str = "") -> Row | None:
    """Do the same as ``exchange``, for a caller that holds the connection's lock."""
    if not HAS_GENERATORS:
        # A statement that frees a lock. It does not wait, so it needs neither a cancel nor signal handlers.
        result = raw.pgconn.exec_((begin + statements).encode())
        if result.status in _BAD:
            raise error_from_result(result)
        return _first_row([result])
    try:
        return waiting.wait(_answer(raw.pgconn, begin, statements), raw.pgconn.socket, interval=SIGNAL_CHECK_INTERVAL)
    except BaseException:
        if raw.pgconn.transaction_status == TransactionStatus.ACTIVE:
            _cancel(raw)
        raise


def _cancel(raw: Connection[Any]) -> None:
    """Cancel the running statement. If this fails, or is interrupted as well, end the session instead of waiting."""
    try:
        raw.cancel_safe(timeout=CANCEL_WITHIN)
        _wait_for_end(raw.pgconn)
    except PsycopgError:
        raw.pgconn.finish()
    except BaseException:
        raw.pgconn.finish()
        raise


def _wait_for_end(pgconn: PGconn) -> None:
    """Wait for the end of an answer. psycopg's own function for this has a time limit only from 3.3 on."""
    deadline, answer = time.monotonic() + CANCEL_WITHIN, _results_of(pgconn)
    with suppress(StopIteration), DefaultSelector() as selector:
        selector.register(pgconn.socket, next(answer))
        while ready := selector.select(max(0.0, deadline - time.monotonic())):
            selector.modify(pgconn.socket, answer.send(ready[0][1]))
        raise OperationalError("the server has not answered a cancel request")


async def exchange_async(raw: Connection[Any], statements: str) -> Row | None:
    """Do the same for a coroutine. No other code may use this connection. A cancel also cancels the statement."""
    while not raw.lock.acquire(blocking=False):
        await asyncio.sleep(RETRY_AFTER)
    try:
        return await _wait_async(raw, _answer(raw.pgconn, begin_for(raw), statements))
    except BaseException:
        if raw.pgconn.transaction_status == TransactionStatus.ACTIVE:
            await _cancel_async(raw)
        raise
    finally:
        raw.lock.release()


async def _wait_async(raw: Connection[Any], answer: PQGen[T]) -> T:
    """Run a generator of psycopg, without ``asyncio.wait_for()``.

    psycopg 3.2 uses it in its own function, and before Python 3.12 it may lose a cancel.
    """
    try:
        wanted = next(answer)
        while True:
            wanted = answer.send(await _ready(raw.pgconn.socket, wanted))
    except StopIteration as ended:
        result: T = ended.value
        return result


async def _ready(number: int, wanted: Wait) -> Ready:
    """Wait until a socket is readable or writable, as wanted."""
    loop = asyncio.get_running_loop()
    is_ready: asyncio.Future[Ready] = loop.create_future()

    def note(ready: Ready) -> None:
        if not is_ready.done():
            is_ready.set_result(ready)

    if wanted & Wait.R:
        loop.add_reader(number, note, Ready.R)
    if wanted & Wait.W:
        loop.add_writer(number, note, Ready.W)
    try:
        return await is_ready
    finally:
        loop.remove_reader(number)
        loop.remove_writer(number)


async def _cancel_async(raw: Connection[Any]) -> None:
    """Do the same as ``_cancel``. If the coroutine is cancelled again, it does not wait, and the session ends."""
    try:
        await asyncio.to_thread(raw.cancel_safe, timeout=CANCEL_WITHIN)
        await asyncio.wait_for(_wait_async(raw, _results_of(raw.pgconn)), CANCEL_WITHIN)
    except (PsycopgError, RuntimeError, asyncio.CancelledError, asyncio.TimeoutError):
        # RuntimeError: the loop ends, and starts no more threads. TimeoutError: the connection may be half open.
        raw.pgconn.finish()


async def receive_async(raw: Connection[Any]) -> None:
    """Wait for data, and pass the notifications in it to psycopg's handlers. No other code may use this connection."""
    await _ready(raw.pgconn.socket, Wait.R)
    receive(raw.pgconn)


def receive(pgconn: PGconn) -> None:
    """Read the data that has arrived, and pass the notifications in it to psycopg's handlers, as psycopg does."""
    pgconn.consume_input()
    while notification := pgconn.notifies():
        if pgconn.notify_handler:
            pgconn.notify_handler(notification)


def _answer(pgconn: PGconn, begin: str, statements: str) -> PQGen[Row | None]:
    """Send a message, and return the row of its answer."""
    pgconn.send_query((begin + statements).encode())
    results = yield from _results_of(pgconn)
    if not results:
        raise OperationalError("the connection was closed before the server answered")
    if results[-1].status in _BAD:
        error: Any = error_from_result(results[-1])
        error.accepted = len(results) - 1 - bool(begin)
        raise error from _reported_error(results[:-1])
    return _first_row(results)


def _results_of(pgconn: PGconn) -> PQGen[list[PGresult]]:
    """Return the results of all statements of a message.

    If the session has ended, the server's last error is the cause of our error.
    """
    results: list[PGresult] = []
    yield from generators.send(pgconn)
    try:
        while (result := (yield from generators.fetch(pgconn))) is not None:
            results.append(result)
    except OperationalError as lost:
        raise lost from _reported_error(results)
    return results


def _reported_error(results: list[PGresult]) -> Exception | None:
    """Return the server's error among some results; errors that libpq itself makes are ignored."""
    errors = (each for each in results if each.status in _BAD and each.error_field(DiagnosticField.SQLSTATE))
    return next(map(error_from_result, errors), None)


def _first_row(results: list[PGresult]) -> Row | None:
    """Return the first row of the last result that has rows."""
    row: Row = []
    for result in reversed(results):
        if result.status != ExecStatus.TUPLES_OK:
            continue
        if not result.ntuples:
            break
        for column in range(result.nfields):
            value = result.get_value(0, column)
            row.append(None if value is None else LOADERS.get(result.ftype(column), bytes.decode)(value))
        return row
    return None
