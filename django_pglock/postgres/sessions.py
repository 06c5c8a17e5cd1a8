"""Sessions in addition to Django's, for parts that need their own: listeners, heartbeats, leases, locks of coroutines.

Each session is opened by its own Django connection object, of the backend that the project has configured. So all
settings and hooks of Django's own sessions apply to it as well: ``get_connection_params`` and ``get_new_connection`` of
a backend's subclass (changing passwords, certificates), ``assume_role``, ``init_connection_state``, receivers of
``connection_created``, and the test database.
"""

from __future__ import annotations

import asyncio
import copy
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from django.utils.module_loading import import_string
from psycopg import Error as PsycopgError
from psycopg import IsolationLevel
from psycopg.pq import TransactionStatus

from django_pglock.errors import ConfigurationError
from django_pglock.postgres.connections import backend_pid, cancel_statement, connection_for, has_ended, shut
from django_pglock.postgres.exchange import CANCEL_WITHIN, exchange_async, receive_async
from django_pglock.postgres.message import is_plain_django, send

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

#: How long libpq waits on a silent network. Its own defaults are hours, or no limit. Seconds to connect; seconds and
#: probes until an idle connection counts as lost; milliseconds without an acknowledgement of sent data until a
#: connection counts as lost. https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS
TIME_LIMITS = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}

#: What statements of this package need, whatever the role's defaults are. psycopg sets an isolation level only in a
#: BEGIN. A single statement in autocommit has the role's default level.
NEEDED = {"default_transaction_isolation": "read committed", "array_nulls": "on"}

# A setting that the server does not know is NULL. To read pg_settings takes a millisecond more.
SET_SETTINGS = """
SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS wanted (name, value)
WHERE current_setting(name, true) IS NOT NULL AND pg_backend_pid() = %s
"""


def dedicated_connection(using: str, *, application_name: str | None = None) -> DatabaseWrapper:
    """Return a new, unshared Django connection to ``using``, outside of each pool and without a maximum age.

    It is opened at its first use, in any thread. The owner closes it. Its transactions are READ COMMITTED, because the
    statements of this package need that. After ``set_limits``, its single statements are READ COMMITTED, too.
    ``application_name`` is shown in ``pg_stat_activity``.
    """
    settings = copy.deepcopy(connection_for(using).settings_dict)
    options = settings["OPTIONS"] = {**TIME_LIMITS, **settings["OPTIONS"]}
    options.pop("pool", None)
    options["isolation_level"] = IsolationLevel.READ_COMMITTED
    if application_name is not None:
        options["application_name"] = application_name[:63]
    settings.update(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=False, ATOMIC_REQUESTS=False, AUTOCOMMIT=True)
    wrapper = import_string(f"{settings['ENGINE']}.base.DatabaseWrapper")
    connection: DatabaseWrapper = wrapper(settings, alias=using)
    connection.inc_thread_sharing()
    return connection


def limit_waiting(connection: DatabaseWrapper) -> None:
    """Limit how long this Django connection waits on a silent network, unless its settings have such limits."""
    settings = connection.settings_dict
    connection.settings_dict = {**settings, "OPTIONS": {**TIME_LIMITS, **settings["OPTIONS"]}}


def set_limits(connection: DatabaseWrapper, limits: Mapping[str, str]) -> None:
    """Set server settings for this session, whatever their values for role, database and server are. One statement.

    In addition, single statements of the session are READ COMMITTED from now on, like its transactions, and NULL in an
    array is not read as a text. Settings that the server does not know are left out. Behind a pooler nothing is set,
    because the next client of the session would get the settings.
    """
    settings = {**NEEDED, **limits}
    with connection.cursor() as cursor:
        cursor.execute(SET_SETTINGS, (list(settings), list(settings.values()), backend_pid(connection)))


# Sessions for coroutines, used without blocking the event loop.
#
# Django's connection belongs to a thread, and all coroutines of a loop share it. For PostgreSQL they would be one
# holder. So coroutines use separate sessions. Each has its own Django connection object, which no other code uses.

#: Seconds after which a statement that still runs is cancelled again.
CANCEL_AGAIN = 0.05


class AsyncSession:
    """An open session. It sends one statement at a time."""

    def __init__(self, connection: DatabaseWrapper) -> None:
        self.connection = connection
        self.raw: Any = connection.connection
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

    async def send(self, statements: str) -> Sequence[Any] | None:
        """Send statements in one message and return the first row of the last answer. Errors are Django's."""
        if self.has_ended or not is_plain_django(self.connection):
            return await self._send_by_cursor(statements)
        try:
            return await exchange_async(self.raw, statements)
        except PsycopgError:
            with self.connection.wrap_database_errors:
                raise

    async def _send_by_cursor(self, statements: str) -> Sequence[Any] | None:
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
        if self.raw.lock.locked():
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
    # Not one of the loop's own threads, because all of them may wait for a server that does not answer.
    with_thread = ThreadPoolExecutor(1, thread_name_prefix="django_pglock connects")
    opening = with_thread.submit(_connect, connection)
    with_thread.shutdown(wait=False)
    try:
        await asyncio.wrap_future(opening)
    except BaseException:
        # Called in the thread, because the loop may end before the thread has connected.
        opening.add_done_callback(lambda _: _finish(connection))
        raise
    return AsyncSession(connection)


def _connect(connection: DatabaseWrapper) -> None:
    connection.ensure_connection()
    # A pooler may accept a client before it has a session for it. Then the first statement waits for one.
    with connection.wrap_database_errors:
        connection.connection.execute("SELECT 1")


def _finish(connection: DatabaseWrapper) -> None:
    if connection.connection is not None:
        connection.connection.pgconn.finish()
