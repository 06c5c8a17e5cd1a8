"""A session of the parent: opened in a thread, and spoken to by the loop, which never waits for the server.

To open a session takes name servers, certificates, and the code of the project (``get_connection_params``, receivers of
``connection_created``), all of which block. So a short-lived thread does it. From then on the loop speaks to the server
with psycopg's own generators: they yield what they wait for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from psycopg.errors import error_from_result

from django_pglock.postgres.connections import shut_down_socket
from django_pglock.postgres.exchange import BAD, receive, results_of
from django_pglock.store.statements import bound_for
from django_pglock.worker.loop import READ, Loop, Timer

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

Rows = list[tuple[str | None, ...]]


class Question(NamedTuple):
    """A message, the seconds within which its answer must come, and what is called with the rows, or the refusal."""

    message: bytes
    within: float
    then: Callable[[list[Rows]], None]
    refused: Callable[[psycopg.Error], None] | None


class Session:
    """One session in the loop. It sends one statement after the other, and receives notifications in between.

    ``open`` returns an open Django connection; it is called in a thread of its own, and may block. ``on_open`` is
    called when the session is open, ``on_lost`` with the error when it could not be opened or was lost, and ``on_note``
    with the payload and the channel of each notification. All three are called in the loop's thread.
    """

    def __init__(
        self,
        loop: Loop,
        open_: Callable[[], DatabaseWrapper],
        *,
        on_open: Callable[[], None],
        on_lost: Callable[[BaseException], None],
        on_note: Callable[[str, str], None],
    ) -> None:
        self.loop = loop
        self._open = open_
        self.on_open = on_open
        self.on_lost = on_lost
        self.on_note = on_note
        # The descriptor of its socket. libpq does not tell it any more when the connection is lost.
        self._socket = -1
        #: The open connection; None: there is none, or it is being opened.
        self.connection: DatabaseWrapper | None = None
        self._opening: threading.Thread | None = None
        self._waiting: deque[Question] = deque()
        self._asked: Question | None = None
        self._answer: Generator[Any, Any, Any] | None = None
        self._deadline: Timer | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a session."""
        return self.connection is not None

    def open(self) -> None:
        """Begin to open a session, unless there is one or one is being opened."""
        if self.connection is None and self._opening is None:
            self._opening = threading.Thread(target=self._open_in_thread, name="lockworker-open", daemon=True)
            try:
                self._opening.start()
            except RuntimeError as error:  # the process may have no more threads
                self._opening = None
                self.on_lost(error)

    def _open_in_thread(self) -> None:
        try:
            connection = self._open()
        except BaseException as error:  # noqa: BLE001 - the project's code may run here, and the loop must know
            failure = error
            self._tell(lambda: self.on_lost(failure))
        else:
            self._tell(lambda: self._begin(connection), otherwise=connection.close)

    def _tell(self, call: Callable[[], None], *, otherwise: Callable[[], None] = lambda: None) -> None:
        """Call a function in the loop, or the other one if the session was closed while this thread was opening it."""
        thread = threading.current_thread()

        def note() -> None:
            if self._opening is thread:
                self._opening = None
                call()
            else:
                otherwise()

        # If it was closed, the loop may be closed as well.
        if self._opening is thread:
            self.loop.call_soon(note)
        else:
            otherwise()

    def _begin(self, connection: DatabaseWrapper) -> None:
        self.connection = connection
        raw: Any = connection.connection
        raw.pgconn.nonblocking = 1
        raw.add_notify_handler(lambda note: self._note(note.channel, note.payload))
        self._socket = raw.pgconn.socket
        self.loop.watch(self._socket, READ, self._on_ready)
        self.on_open()

    def ask(
        self,
        *parts: tuple[str, Sequence[Any]],
        within: float,
        then: Callable[[list[Rows]], None] = lambda rows: None,
        refused: Callable[[psycopg.Error], None] | None = None,
    ) -> None:
        """Send statements with their values as one message, which is one transaction, when the earlier ones are
        answered.

        ``then`` is called with the rows of each statement, as texts. If there is no answer ``within`` some seconds, the
        session is closed. If the server refuses a statement, ``refused`` is called with the error; without it, the
        session is closed as well.
        """
        if self.connection is None:
            return
        raw = self.connection.connection
        message = ";".join(bound_for(raw, *part) for part in parts)
        self._waiting.append(Question(message.encode(), within, then, refused))
        self._send_next()

    def close(self) -> None:
        """Close the session, and forget what was asked."""
        connection, self.connection, self._opening = self.connection, None, None
        self._asked = self._answer = None
        self._waiting.clear()
        if self._deadline is not None:
            self._deadline.cancel()
        if connection is not None:
            self.loop.unwatch(self._socket)
            # First the socket: libpq would wait to say goodbye to a server that does not read.
            shut_down_socket(connection)
            connection.close()

    def _send_next(self) -> None:
        if self.connection is None or self._asked is not None or not self._waiting:
            return
        raw: Any = self.connection.connection
        self._asked = self._waiting.popleft()
        try:
            raw.pgconn.send_query(self._asked.message)
        except psycopg.Error as error:
            self._lose(error)
            return
        self._deadline = self.loop.call_later(self._asked.within, self._on_deadline)
        self._answer = results_of(raw.pgconn)
        self._advance(None)

    def _on_ready(self) -> None:
        if self._answer is not None:
            self._advance(READ)
            return
        raw: Any = self.connection and self.connection.connection
        try:
            receive(raw.pgconn)
        except psycopg.Error as error:
            self._lose(error)

    def _note(self, channel: str, payload: str) -> None:
        # Anybody may notify. An error must not reach psycopg's generator, which would end with it.
        self.loop.call(lambda: self.on_note(channel, payload))

    def _advance(self, ready: Any) -> None:
        """Continue psycopg's generator, until it waits for the socket again or has the results."""
        answer = self._answer
        assert answer is not None  # noqa: S101 - for the type checker
        try:
            events = int(answer.send(ready))
            self.loop.watch(self._socket, events, lambda: self._advance(events))
        except StopIteration as ended:
            self.loop.watch(self._socket, READ, self._on_ready)
            self._finish(ended.value)
        except psycopg.Error as error:
            self._lose(error)

    def _finish(self, results: list[Any]) -> None:
        question, self._asked, self._answer = self._asked, None, None
        assert question is not None  # noqa: S101 - for the type checker
        assert self._deadline is not None  # noqa: S101
        self._deadline.cancel()
        error = next((error_from_result(each) for each in results if each.status in BAD), None)
        if error is None:
            question.then(list(map(_rows_of, results)))
        elif question.refused is not None:
            question.refused(error)
        else:
            self._lose(error)
        self._send_next()

    def _on_deadline(self) -> None:
        self._lose(psycopg.OperationalError("the server has not answered in time"))

    def _lose(self, error: BaseException) -> None:
        self.close()
        self.on_lost(error)


def _rows_of(result: Any) -> Rows:
    def text(row: int, column: int) -> str | None:
        value = result.get_value(row, column)
        return None if value is None else bytes(value).decode()

    return [tuple(text(row, column) for column in range(result.nfields)) for row in range(result.ntuples)]
