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
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db import OperationalError
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
#: Seconds without use after which a pool ends a session.
IDLE_TIMEOUT = 60.0
#: Seconds after which a statement that still runs is cancelled again.
CANCEL_AGAIN = 0.05


class NoSession(OperationalError):
    """A session could not be opened within the time that the caller has set, and none was given back."""


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
    def is_busy(self) -> bool:
        """Whether a statement is running."""
        return self._statement_lock.locked()

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


class AsyncSessionPool:
    """A pool of up to ``limit`` sessions to one database alias, for one event loop.

    ``ended`` is called with each session that the pool has ended.
    """

    def __init__(self, using: str, *, limit: int, ended: Callable[[AsyncSession], object] = lambda _: None) -> None:
        self.using = using
        self.limit = limit
        self.in_use = 0
        self._ended = ended
        # The unused sessions, and since when; the last was given back last.
        self._idle: list[tuple[float, AsyncSession]] = []
        # For each caller that waits for a new session: it gets the next one that is given back, if this is earlier.
        self._awaited: list[asyncio.Future[AsyncSession]] = []
        self._has_opened = False
        # The timer itself is not kept: it knows the loop, which could not be collected then.
        self._has_timer = False

    @property
    def has_capacity(self) -> bool:
        """Whether one more session may be lent."""
        return self.in_use < self.limit

    async def get(self, within: float | None = None) -> AsyncSession:
        """Return a session for the caller alone. The caller has checked ``has_capacity``. Raises as ``take()``."""
        self.in_use += 1
        try:
            return await self.take(within)
        except BaseException:
            self.in_use -= 1
            raise

    async def take(self, within: float | None = None) -> AsyncSession:
        """Return a session that the pool does not count and does not get back.

        A pooler may let a client wait until another one disconnects, perhaps one of this pool. So the caller gets the
        new session or a session that is given back, whichever comes first. Raises ``NoSession`` after ``within``
        seconds. The first session has no limit here, because a server may be slow to connect to.
        """
        if (unused := self._take_idle()) is not None:
            return unused
        opening = asyncio.ensure_future(open_session(self.using))
        given: asyncio.Future[AsyncSession] = asyncio.get_running_loop().create_future()
        self._awaited.append(given)
        taken: AsyncSession | None = None
        try:
            while not (given.done() or opening.done()):
                await asyncio.wait({opening, given}, timeout=within, return_when=asyncio.FIRST_COMPLETED)
                # Asked here, because several callers may begin at once, before the first session is open.
                if self._has_opened and not (given.done() or opening.done()):
                    raise NoSession(f"No session to database {self.using!r} was free within {within:g} s.")
            taken = given.result() if given.done() else opening.result()
            self._has_opened = True
            return taken
        finally:
            self._awaited.remove(given)
            # The one that was not taken; both, if the caller was cancelled.
            opening.cancel()
            for each in (opening, given):
                if each.done() and not each.cancelled() and each.exception() is None and each.result() is not taken:
                    self._keep(each.result())

    def put(self, session: AsyncSession) -> None:
        """Take a session back. Keep it for the next user if it is reusable, otherwise end it."""
        self.in_use -= 1
        if session.is_reusable:
            self._keep(session)
        else:
            self._finish(session)

    def _keep(self, session: AsyncSession) -> None:
        """Give a session to a caller that waits for one, or keep it for the next one."""
        for given in self._awaited:
            if not given.done():
                given.set_result(session)
                return
        self._idle.append((time.monotonic(), session))
        self._set_timer(IDLE_TIMEOUT)

    def close_idle(self) -> None:
        """End the unused sessions."""
        while self._idle:
            self._finish(self._idle.pop()[1])

    def _take_idle(self) -> AsyncSession | None:
        while self._idle:
            _, session = self._idle.pop()
            if not session.has_ended:
                return session
            self._finish(session)
        return None

    def _finish(self, session: AsyncSession) -> None:
        session.end()
        self._ended(session)

    def _set_timer(self, seconds: float) -> None:
        if not self._has_timer:
            # A session may be given back when its loop has stopped. Then the end of the loop ends the session.
            with suppress(RuntimeError):
                asyncio.get_running_loop().call_later(seconds, self._close_old)
                self._has_timer = True

    def _close_old(self) -> None:
        self._has_timer = False
        now = time.monotonic()
        while self._idle and self._idle[0][0] + IDLE_TIMEOUT <= now:
            self._finish(self._idle.pop(0)[1])
        if self._idle:
            self._set_timer(self._idle[0][0] + IDLE_TIMEOUT - now)
