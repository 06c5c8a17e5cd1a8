"""Sessions for coroutines: opened like all sessions, and used without blocking the event loop.

Django's connection belongs to a thread, and all coroutines of a loop share it. For PostgreSQL they would be one holder.
So coroutines use separate sessions. Each has its own Django connection object, which no other code uses.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from psycopg import Error as PsycopgError
from psycopg.pq import TransactionStatus

from django_pglock.errors import ConfigurationError
from django_pglock.postgres.connections import cancel_statement, has_ended, shut
from django_pglock.postgres.exchange import CANCEL_WITHIN, exchange_async, receive_async
from django_pglock.postgres.message import is_plain_django, send
from django_pglock.postgres.sessions import dedicated_connection

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

Row = Sequence[Any]
#: Seconds after which a statement that still runs is cancelled again.
CANCEL_AGAIN = 0.05


class AsyncSession:
    """An open session. It sends one statement at a time. Coroutines that share it wait for each other's statements."""

    def __init__(self, connection: DatabaseWrapper) -> None:
        self.connection = connection
        self.raw: Any = connection.connection
        self._statement_lock = asyncio.Lock()
        #: A thread for statements through Django's cursor, which blocks the thread that uses it.
        self._thread: ThreadPoolExecutor | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the session has ended, as far as this is known without a query."""
        return has_ended(self.raw)

    @property
    def is_reusable(self) -> bool:
        """Whether another user may get the session: it is alive, and no transaction is open."""
        return not self.has_ended and self.raw.pgconn.transaction_status == TransactionStatus.IDLE

    async def send(self, statements: str) -> Row | None:
        """Send statements in one message and return the first row of the last answer. Errors are Django's."""
        async with self._statement_lock:
            if self.has_ended or not is_plain_django(self.connection):
                return await self._send_by_cursor(statements)
            try:
                return await exchange_async(self.raw, statements)
            except PsycopgError:
                with self.connection.wrap_database_errors:
                    raise

    async def _send_by_cursor(self, statements: str) -> Row | None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="django_pglock session")
        loop = asyncio.get_running_loop()
        sending = loop.run_in_executor(self._thread, send, self.connection, statements)
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            # Otherwise asyncio would log that no code has read the error of the cancelled statement.
            sending.add_done_callback(asyncio.Future.exception)
            # The statement may not have been sent yet, so a single cancel may have no effect.
            deadline = time.monotonic() + CANCEL_WITHIN
            while not sending.done():
                await loop.run_in_executor(None, partial(_cancel, self.connection))
                await asyncio.wait([sending], timeout=CANCEL_AGAIN)
                if time.monotonic() > deadline:
                    shut(self.raw)
            raise

    async def notifications(self) -> AsyncGenerator[str, None]:
        """Yield the payloads of notifications on the channels that this session listens to. Errors are Django's."""
        heard: list[str] = []

        def hear(notification: Any) -> None:
            heard.append(notification.payload)

        self.raw.add_notify_handler(hear)
        with self.connection.wrap_database_errors:
            while True:
                while heard:
                    yield heard.pop(0)
                await receive_async(self.raw)

    def end(self) -> None:
        """End the session and all its locks at once, without a wait."""
        if self._statement_lock.locked():
            # This wakes a coroutine that waits for an answer.
            shut(self.raw)
        else:
            self.raw.pgconn.finish()
        if self._thread is not None:
            self._thread.shutdown(wait=False)


def _cancel(connection: DatabaseWrapper) -> None:
    try:
        cancel_statement(connection)
    except PsycopgError:
        shut(connection.connection)


def refuse_greenlets(what: str, advice: str) -> None:
    """Raise ``ConfigurationError`` if gevent has replaced threads by greenlets, which share one real thread.

    While one greenlet runs an event loop, Django treats all greenlets as coroutines and opens no session.
    """
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("threading"):
        raise ConfigurationError(
            f"{what} needs its own thread, and gevent has replaced threads with greenlets. {advice} in a process "
            "without gevent.monkey."
        )


async def open_session(using: str) -> AsyncSession:
    """Open a session to the database alias ``using``. After a cancel of the call, no session remains."""
    connection = dedicated_connection(using)
    is_given_up = threading.Event()

    def connect() -> None:
        connection.ensure_connection()
        try:
            # A pooler may accept a client before it has a session for it. Then the first statement waits for one.
            with connection.wrap_database_errors:
                connection.connection.execute("SELECT 1")
        except BaseException:
            _finish(connection)
            raise
        if is_given_up.is_set():
            _finish(connection)

    connecting = asyncio.ensure_future(_in_thread(connect))
    try:
        await asyncio.shield(connecting)
    except asyncio.CancelledError:
        # No callback in the loop, because the loop may end before the thread has connected.
        is_given_up.set()
        connecting.add_done_callback(lambda ended: _finish_given_up(connection, ended))
        raise
    return AsyncSession(connection)


def _finish_given_up(connection: DatabaseWrapper, connecting: asyncio.Future[None]) -> None:
    # Its error is read, because otherwise asyncio would log that no code has read it.
    _ = connecting.cancelled() or connecting.exception()
    _finish(connection)


def _finish(connection: DatabaseWrapper) -> None:
    if connection.connection is not None:
        connection.connection.pgconn.finish()


async def _in_thread(function: Callable[[], None]) -> None:
    # Not one of the loop's own threads, because all of them may wait for a server that does not answer.
    with_thread = ThreadPoolExecutor(1, thread_name_prefix="django_pglock connects")
    try:
        await asyncio.get_running_loop().run_in_executor(with_thread, function)
    finally:
        with_thread.shutdown(wait=False)
