"""A loop in your own code that PostgreSQL wakes by LISTEN and NOTIFY.

A notification reaches only processes that listen at that moment. So a notification should only mean "query now", and
the woken process reads the table. ``listen`` also starts an iteration of the loop whenever notifications may have been
missed: at the start, after a lost session, and from time to time. Behind a pooler in transaction mode, only the last of
these works.
"""

from __future__ import annotations

import reprlib
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django.db import close_old_connections
from psycopg import sql

from django_pglock.conf import get_settings
from django_pglock.error_reading import one_line
from django_pglock.loggers import get_logger
from django_pglock.postgres.connections import CONNECTION_ERRORS, connection_for, pause_after
from django_pglock.postgres.exchange import receive
from django_pglock.postgres.forking import keep_from_children
from django_pglock.postgres.sessions import dedicated_connection, set_limits

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

__all__ = ["listen", "notify"]

logger = get_logger("django_pglock.listen")

#: Bytes of the name of a channel, and of a payload. PostgreSQL cuts a longer name of LISTEN.
MOST_CHANNEL, MOST_PAYLOAD = 63, 7999


def notify(channel: str, payload: str = "", *, using: str | None = None) -> None:
    """Wake all processes that ``listen`` on this channel, at the commit of the current transaction.

    After a rollback, no process is woken. ``payload`` is a text of less than 8000 bytes. ``using`` is the database
    alias; default from the setting ``USING``. Commits of transactions that notify wait for each other. So notify once
    in a transaction, not once for each row. Raises ``ValueError`` for a channel that is no text of 1 to 63 bytes, and
    for any other payload.
    """
    _check_text("channel", channel, range(1, MOST_CHANNEL + 1))
    _check_text("payload", payload, range(MOST_PAYLOAD + 1))
    with connection_for(using or get_settings().USING).cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, %s)", (channel, payload))


def listen(channel: str, *, poll: float | None = None, using: str | None = None) -> Iterator[list[str]]:
    """Iterate at once, then at each notification on this channel, and at least every ``poll`` seconds.

    ::

        for _ in listen("letters"):
            while send_next_letter():
                pass

    Each iteration yields the payloads of the notifications since the last one; the list may be empty. ``poll`` defaults
    to the setting ``POLL_INTERVAL``. ``using`` is the database alias; default from the setting ``USING``.

    It listens in a separate session. If that is lost, another one is opened, however long it takes, and the loop
    iterates. Before each iteration Django's connections of this thread are checked, as before a request. Raises
    Django's ``OperationalError`` if the first session cannot be opened, and ``ValueError`` for a channel that is no
    text of 1 to 63 bytes.
    """
    _check_text("channel", channel, range(1, MOST_CHANNEL + 1))
    using, settings = using or get_settings().USING, get_settings()
    session = _open(using, channel)
    payloads: list[str] = []
    try:
        while True:
            close_old_connections()
            yield payloads
            try:
                payloads = _wait(session, settings.POLL_INTERVAL if poll is None else poll)
            except CONNECTION_ERRORS as error:
                logger.warning("The session that listens on %r is lost: %s", channel, one_line(error))
                session.close()
                session, payloads = _open_again(using, channel), []
    finally:
        session.close()


def _check_text(name: str, text: str, lengths: range) -> None:
    """Raise ``ValueError`` for a value that is no text, or that PostgreSQL would refuse or cut."""
    try:
        is_ok = "\0" not in text and len(text.encode()) in lengths
    except (AttributeError, TypeError, UnicodeEncodeError):
        is_ok = False
    if not is_ok:
        shown = reprlib.repr(text)
        raise ValueError(f"The {name} is {shown}; give a text of {lengths[0]} to {lengths[-1]} bytes.")


def _open(using: str, channel: str) -> DatabaseWrapper:
    session = dedicated_connection(using, application_name="django_pglock listen")
    start_listening(session, channel)
    return session


def start_listening(session: DatabaseWrapper, channel: str) -> None:
    """Open a session that is idle most of the time, and let it listen. After an error it is closed."""
    try:
        # Whatever limit the role has.
        set_limits(session, {"idle_session_timeout": "0"})
        with session.cursor() as cursor:
            cursor.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
    except BaseException:
        session.close()
        raise


def _open_again(using: str, channel: str) -> DatabaseWrapper:
    failures = 0
    while True:
        with suppress(*CONNECTION_ERRORS):
            return _open(using, channel)
        failures += 1
        time.sleep(pause_after(failures))


def _wait(session: DatabaseWrapper, seconds: float) -> list[str]:
    raw: Any = session.connection
    payloads = [notification.payload for notification in raw.notifies(timeout=seconds, stop_after=1)]
    if not payloads:
        # There was no notification. Check whether the server still answers.
        with session.cursor() as cursor:
            cursor.execute("SELECT 1")
    return payloads


class Waker:
    """Lets a thread wait for its session and for other threads at once."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.setblocking(False)
            keep_from_children(end)

    def wake(self) -> None:
        """End the wait of the thread. Takes no lock and does not wait."""
        # An error means that the thread has ended, or that it has not yet read what was sent before.
        with suppress(OSError):
            self._theirs.send(b"!")

    def wait(self, seconds: float, session: DatabaseWrapper | None = None) -> None:
        """Wait for another thread, and for data in a session, whose notifications go to psycopg's handlers."""
        raw: Any = session and session.connection
        # It needs no file descriptor, of which there may be none left.
        with selectors.PollSelector() as selector:
            for each in (self._ours, *([raw] if raw else [])):
                selector.register(each, selectors.EVENT_READ)
            selector.select(max(0.0, seconds))
        with suppress(BlockingIOError):
            self._ours.recv(65536)
        if raw:
            receive(raw.pgconn)

    def close(self) -> None:
        """Free the sockets."""
        self._ours.close()
        self._theirs.close()
