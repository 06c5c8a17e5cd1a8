"""The session that receives a notification when an awaited task has ended: one for each database alias with waiters.

One thread owns the session, as long as there are waiters. So a waiter needs neither a thread nor a session. ::

    wait(), await_()  --joins, leaves-->  changes  --thread-->  a row in the table of waiters, then a query of the task
         ^                                                          |
         └---------------- tell(), once ----------------------------┴-- NOTIFY, or the poll

All waiters that came while the thread was busy are served together: one statement writes their rows, and one reads
their tasks. Only the thread reads the list of waiters, so only its start and its end need a lock. ``leave()`` takes no
lock, because a coroutine may be cancelled at any point.

One statement for all waiters polls every ``POLL_INTERVAL`` seconds, because behind a pooler no notification arrives. If
the session is lost, the thread opens another one, writes the rows again, and reads all awaited tasks.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from django.db import connections

from django_pglock.conf import get_settings
from django_pglock.error_reading import one_line
from django_pglock.loggers import get_logger
from django_pglock.postgres.connections import CONNECTION_ERRORS, has_session_ended, shut_down_socket
from django_pglock.postgres.forking import keep_from_children
from django_pglock.postgres.libpq import pass_on_notifications
from django_pglock.postgres.sessions import dedicated_connection, set_limits
from django_pglock.store.release import DONE_CHANNEL, ended, write_waiters

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

logger = get_logger("django_pglock.tasks")

#: Seconds for all statements of one pass of the thread. A half-open connection never answers.
STATEMENT_TIMEOUT = 15.0
#: Seconds for which waiters wait for a server that cannot be reached. Then they get the error.
LONGEST_OUTAGE = 60.0
#: Seconds before the first new connection after a lost session; doubled each time up to the second number.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 3.0


class WaitingCaller:
    """One caller that waits for the end of one task.

    ``tell`` is called once, in the listener's thread: with True if the task has ended, with False if there is no such
    task, and with the error if the database could not be queried. ``is_abandoned`` returns whether the caller no longer
    exists.
    """

    def __init__(
        self, task_id: int, tell: Callable[[bool | BaseException], None], *, is_abandoned: Callable[[], bool]
    ) -> None:
        self.task_id = task_id
        self.tell = tell
        self.is_abandoned = is_abandoned


@contextmanager
def listening(using: str, waiter: WaitingCaller) -> Iterator[None]:
    """Call ``waiter.tell`` if its task in the database ``using`` ends within this block."""
    with _guard:
        listener = _listeners.get(using)
        if listener is None:
            listener = ResultListener(using)
            listener.start()
            _listeners[using] = listener
        listener.join(waiter)
    try:
        yield
    finally:
        listener.leave(waiter)


class ResultListener:
    """The session of one database alias, and the thread that owns it."""

    def __init__(self, using: str) -> None:
        self.using = using
        self._changes: deque[tuple[WaitingCaller, bool]] = deque()
        #: A byte that is sent here ends the sleep of the thread.
        self._wake_sender, self._wake_receiver = socket.socketpair()
        for end in (self._wake_sender, self._wake_receiver):
            end.setblocking(False)
            keep_from_children(end)
        # Only the thread uses the following.
        self._waiting: dict[int, set[WaitingCaller]] = {}
        self._connection: DatabaseWrapper | None = None
        # The ids of our rows in the table of waiters: by task, and those of sessions before this one.
        self._row_ids: dict[int, int] = {}
        self._stale: list[int] = []
        self._notified: list[int] = []
        self._poll_at = 0.0
        self._lost_at: float | None = None
        #: The tasks that were awaited when the session was lost.
        self._before_loss: set[int] = set()
        self._failures = 0

    def start(self) -> None:
        """Start the thread. It ends by itself when there are no more waiters."""
        threading.Thread(target=self._run, name="django_pglock wait", daemon=True).start()

    def join(self, waiter: WaitingCaller) -> None:
        """Add a waiter. The caller holds ``_guard``, so that the thread cannot end meanwhile."""
        self._changes.append((waiter, True))
        self._wake()

    def leave(self, waiter: WaitingCaller) -> None:
        """Remove a waiter. Takes no lock and does not wait. Has no effect if the thread has ended."""
        self._changes.append((waiter, False))
        self._wake()

    def _wake(self) -> None:
        # An error means that the thread has ended, or that it has not yet read what was sent before.
        with suppress(OSError):
            self._wake_sender.send(b"!")

    # The thread

    def _run(self) -> None:
        try:
            while not self._unregister_if_idle():
                self._run_once_or_lose_session()
        except BaseException as error:
            logger.exception("The listener for results has failed.")
            self._give_up(error)
        finally:
            self._close()
            self._wake_sender.close()
            self._wake_receiver.close()

    def _unregister_if_idle(self) -> bool:
        """Unregister if there are no waiters and no rows to delete. Return whether this is the case."""
        with _guard:
            if self._waiting or self._changes:
                return False
            if self._connection is not None and (self._row_ids or self._stale):
                return False
            _unregister(self)
            return True

    def _give_up(self, error: BaseException) -> None:
        with _guard:
            _unregister(self)
        self._take_changes()
        self._tell(list(self._waiting), error)

    def _run_once_or_lose_session(self) -> None:
        try:
            self._run_once()
        except CONNECTION_ERRORS as error:
            self._lose(error)

    def _run_once(self) -> None:
        self._take_changes()
        if self._waiting and self._connection is None:
            self._connect()
        if self._connection is None:
            return
        with _limited(self._connection):
            self._tell_ended(self._sync_rows())
        self._lost_at, self._failures = None, 0
        self._before_loss.clear()
        if self._waiting:
            self._wait_for_notification()

    def _take_changes(self) -> None:
        while self._changes:
            waiter, joins = self._changes.popleft()
            waiters = self._waiting.setdefault(waiter.task_id, set())
            (waiters.add if joins else waiters.discard)(waiter)
            if not waiters:
                del self._waiting[waiter.task_id]

    def _connect(self) -> None:
        connection = dedicated_connection(self.using, application_name="django_pglock wait")
        self._connection = connections[self.using] = connection
        with _limited(connection):
            connection.ensure_connection()
            raw: Any = connection.connection
            raw.add_notify_handler(self._note_notification)
            # This session is idle most of the time, whatever limit the role has.
            set_limits(connection, {"idle_session_timeout": "0"})
            with connection.cursor() as cursor:
                cursor.execute(f"LISTEN {DONE_CHANNEL}")

    def _sync_rows(self) -> list[int]:
        """Write a row for each task that is awaited now, delete the others, and return the ids of the new tasks."""
        new = [id_ for id_ in self._waiting if id_ not in self._row_ids]
        left = [id_ for id_ in self._row_ids if id_ not in self._waiting]
        if new or left or self._stale:
            rows = write_waiters(self.using, new, instead_of=[*self._stale, *map(self._row_ids.__getitem__, left)])
            self._stale.clear()
            for id_ in left:
                del self._row_ids[id_]
            self._row_ids.update(rows)
        return new

    def _tell_ended(self, new: list[int]) -> None:
        """Query the new tasks, and from time to time all awaited tasks, and tell the waiters of the ended ones."""
        if time.monotonic() >= self._poll_at:
            self._poll_at = time.monotonic() + get_settings().POLL_INTERVAL
            self._remove_abandoned()
            new = list(self._waiting)
        if new:
            for id_, is_there in ended(self.using, new):
                self._tell([id_], is_there)

    def _remove_abandoned(self) -> None:
        for waiters in self._waiting.values():
            for waiter in waiters:
                if waiter.is_abandoned():
                    self._changes.append((waiter, False))

    def _wait_for_notification(self) -> None:
        assert self._connection is not None  # noqa: S101 - for the type checker
        raw: Any = self._connection.connection
        if not (self._notified or self._changes):
            self._sleep(self._poll_at - time.monotonic(), raw)
        raw.pgconn.consume_input()
        pass_on_notifications(raw.pgconn)
        notified, self._notified = self._notified, []
        for id_ in notified:
            # The sender has deleted the row.
            self._row_ids.pop(id_, None)
        self._tell(notified, True)

    def _sleep(self, seconds: float, *others: Any) -> None:
        with selectors.DefaultSelector() as selector:
            for each in (self._wake_receiver, *others):
                selector.register(each, selectors.EVENT_READ)
            selector.select(max(0.0, seconds))
        with suppress(BlockingIOError):
            self._wake_receiver.recv(65536)

    def _note_notification(self, notification: Any) -> None:
        # Any program may send any payload.
        if notification.payload.isdecimal():
            self._notified.append(int(notification.payload))

    def _tell(self, ids: Iterable[int], answer: bool | BaseException) -> None:
        for id_ in ids:
            for waiter in self._waiting.pop(id_, ()):
                waiter.tell(answer)

    # A lost session

    def _lose(self, error: BaseException) -> None:
        """Keep the waiters for some time, until there is another session. Waiters that come meanwhile get the error."""
        is_lost = self._connection is not None and has_session_ended(self._connection)
        self._before_loss.update(self._waiting if is_lost else self._row_ids)
        self._close()
        self._stale += self._row_ids.values()
        self._row_ids.clear()
        self._poll_at, self._failures = 0.0, self._failures + 1
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            logger.warning("The session that listens for results is lost: %s", one_line(error))
        is_given_up = time.monotonic() - self._lost_at > LONGEST_OUTAGE
        self._tell([id_ for id_ in self._waiting if is_given_up or id_ not in self._before_loss], error)
        if self._waiting:
            self._sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self._failures - 1, 10)))

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*CONNECTION_ERRORS):
                connection.close()
            del connections[self.using]


@contextmanager
def _limited(connection: DatabaseWrapper) -> Iterator[None]:
    """Shut the connection down if this block takes too long, so that its statement fails."""
    timer = threading.Timer(STATEMENT_TIMEOUT, shut_down_socket, [connection])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_listeners: dict[str, ResultListener] = {}
#: Held while a thread ends and while a waiter joins, so that no waiter joins a thread that is about to end.
_guard = threading.Lock()


def _unregister(listener: ResultListener) -> None:
    if _listeners.get(listener.using) is listener:
        del _listeners[listener.using]


def _reset_after_fork() -> None:
    # A forked process has neither the threads nor the waiters.
    global _guard
    _guard = threading.Lock()
    _listeners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
