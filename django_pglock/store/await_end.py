"""Waits until a task has ended, in threads and in coroutines, by one session for each database alias with waiters.

One thread owns the session, as long as there are waiters. So a waiter needs neither a thread nor a session. ::

    wait(), await_()  --joins, leaves-->  changes  --thread-->  a row in the table of waiters, then a query of the task
         ^                                                          |
         └---------------- answer, once ----------------------------┴-- NOTIFY, or the poll

All waiters that came while the thread was busy are served together: one statement writes their rows, and one reads
their tasks. Only the thread reads the list of waiters, so only its start and its end need a lock. To leave takes no
lock, because a coroutine may be cancelled at any point.

One statement for all waiters polls every ``POLL_INTERVAL`` seconds, because behind a pooler no notification arrives. If
the session is lost, the thread opens another one, and reads all awaited tasks.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from django.db import connections

from django_pglock.conf import get_settings
from django_pglock.error_reading import one_line
from django_pglock.errors import TaskError
from django_pglock.loggers import get_logger
from django_pglock.postgres.connections import (
    CONNECTION_ERRORS,
    connection_for,
    in_transaction,
    pause_after,
    shut_down_socket,
)
from django_pglock.postgres.notifications import Waker, start_listening
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store.release import DONE_CHANNEL, ended, write_waiters
from django_pglock.tasks.claim import running_claim

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

logger = get_logger("django_pglock.tasks")

#: Seconds for all statements of one pass of the thread. A half-open connection never answers.
STATEMENT_TIMEOUT = 15.0
#: Seconds for which waiters wait for a server that cannot be reached. Then they get the error.
LONGEST_OUTAGE = 60.0


def await_end(task_id: int, using: str, timeout: float | None) -> bool | None:
    """Wait until a task has ended, for ``timeout`` seconds at most (None: as long as it takes).

    Returns True when it has, False when there is no such task, None when the time is over. Raises ``TaskError`` inside
    a transaction: no worker sees the task before the commit, so the caller would wait for itself. Raises it also inside
    of a task.
    """
    if in_transaction(connection_for(using)):
        raise TaskError("wait() inside atomic() would never return: no worker sees the task before the commit.")
    _refuse_in_task(task_id)
    with _listening(using, task_id) as answer:
        try:
            return answer.result(timeout)
        except WaitedTooLong:
            return None


async def await_end_async(task_id: int, using: str, timeout: float | None) -> bool | None:
    """Do the same for a coroutine. It occupies no thread while it waits."""
    _refuse_in_task(task_id)
    with _listening(using, task_id) as said:
        answer = asyncio.wrap_future(said)
        try:
            await asyncio.wait([answer], timeout=timeout)
            return answer.result() if answer.done() else None
        finally:
            # The loop may have been closed while the coroutine waited.
            with suppress(RuntimeError):
                answer.cancel()


def _refuse_in_task(task_id: int) -> None:
    """Raise ``TaskError`` inside of a task.

    Once such tasks wait in all threads and coroutines of the workers, each waits for a task that cannot begin.
    """
    if (claim := running_claim.get()) is not None:
        raise TaskError(
            f"{claim} waits for task {task_id}. If such tasks wait in all threads, none of the awaited ones can begin. "
            "Call context.gather(): the task occupies no thread while it waits, and gets the results. Or enqueue what "
            "follows with using(after=result)."
        )


@contextmanager
def _listening(using: str, task_id: int) -> Iterator[Future[bool]]:
    """Yield the answer for a task: whether there is such a task, once it has ended; or the error of the database."""
    answer: Future[bool] = Future()
    with _guard:
        listener = _listeners.get(using)
        if listener is None:
            listener = _listeners[using] = _Listener(using)
            listener.start()
        listener.change(task_id, answer, joins=True)
    try:
        yield answer
    finally:
        listener.change(task_id, answer, joins=False)


class _Listener(threading.Thread):
    """The session of one database alias, and the thread that owns it. It ends when there are no more waiters."""

    def __init__(self, using: str) -> None:
        super().__init__(name="django_pglock wait", daemon=True)
        self.using = using
        self._changes: deque[tuple[int, Future[bool], bool]] = deque()
        self._waker = Waker()
        # Only the thread uses the following.
        self._waiting: dict[int, set[Future[bool]]] = {}
        self._connection: DatabaseWrapper | None = None
        # The ids of our rows in the table of waiters, by task. They stay when the session is lost.
        self._rows: dict[int, int] = {}
        self._notified: list[int] = []
        self._poll_at, self._failures = 0.0, 0
        self._lost_at: float | None = None

    def change(self, task_id: int, answer: Future[bool], *, joins: bool) -> None:
        """Add or remove a waiter. Takes no lock and does not wait. Who joins holds ``_guard``."""
        self._changes.append((task_id, answer, joins))
        self._waker.wake()

    def run(self) -> None:
        """Serve the waiters until there are none."""
        try:
            while not self._ends_if_idle():
                self._serve_or_lose_session()
        except BaseException as error:
            logger.exception("The listener for results has failed.")
            with _guard:
                del _listeners[self.using]
            self._take_changes()
            self._tell(list(self._waiting), error)
        finally:
            self._close()
            self._waker.close()

    def _ends_if_idle(self) -> bool:
        """Unregister if there are no waiters and no rows to delete. Return whether this is the case."""
        with _guard:
            if self._waiting or self._changes or (self._connection and self._rows):
                return False
            del _listeners[self.using]
            return True

    def _serve_or_lose_session(self) -> None:
        try:
            self._serve()
        except CONNECTION_ERRORS as error:
            self._lose(error)

    def _serve(self) -> None:
        if self._connection is None:
            self._connect()
        self._take_changes()
        with _limited(self._connection):
            self._tell_ended(self._write_rows())
        self._lost_at, self._failures = None, 0
        if self._waiting:
            self._wait_for_notification()

    def _take_changes(self) -> None:
        while self._changes:
            task_id, answer, joins = self._changes.popleft()
            answers = self._waiting.setdefault(task_id, set())
            (answers.add if joins else answers.discard)(answer)
            if not answers:
                del self._waiting[task_id]

    def _connect(self) -> None:
        connection: Any = dedicated_connection(self.using, application_name="django_pglock wait")
        with _limited(connection):
            start_listening(connection, DONE_CHANNEL)
        connection.connection.add_notify_handler(self._note_notification)
        self._connection = connections[self.using] = connection

    def _write_rows(self) -> list[int]:
        """Write a row for each task that is awaited now, delete the others, and return the ids of the new tasks."""
        new = [id_ for id_ in self._waiting if id_ not in self._rows]
        gone = {id_: row for id_, row in self._rows.items() if id_ not in self._waiting}
        if new or gone:
            written = write_waiters(self.using, new, instead_of=list(gone.values()))
            self._rows = {id_: row for id_, row in self._rows.items() if id_ not in gone} | written
        return new

    def _tell_ended(self, new: Collection[int]) -> None:
        """Query the new tasks, and from time to time all awaited tasks, and tell the waiters of the ended ones."""
        if time.monotonic() >= self._poll_at:
            self._poll_at = time.monotonic() + get_settings().POLL_INTERVAL
            new = list(self._waiting)
        if new:
            for id_, is_there in ended(self.using, list(new)):
                self._tell([id_], is_there)

    def _wait_for_notification(self) -> None:
        is_due = self._notified or self._changes
        self._waker.wait(0.0 if is_due else self._poll_at - time.monotonic(), self._connection)
        notified, self._notified = self._notified, []
        for id_ in notified:
            # The sender has deleted the row.
            self._rows.pop(id_, None)
        self._tell(notified, True)

    def _note_notification(self, notification: Any) -> None:
        # Any program may send any payload.
        if notification.payload.isdecimal():
            self._notified.append(int(notification.payload))

    def _tell(self, ids: Iterable[int], said: bool | BaseException) -> None:
        for answer in [each for id_ in ids for each in self._waiting.pop(id_, ())]:
            # False: the waiter was cancelled.
            if answer.set_running_or_notify_cancel():
                answer.set_exception(said) if isinstance(said, BaseException) else answer.set_result(said)

    def _lose(self, error: BaseException) -> None:
        """Keep the waiters for some time, until there is another session. Waiters that come meanwhile get the error."""
        present = set(self._waiting)
        if self._connection is None:
            self._take_changes()
        self._close()
        self._poll_at = 0.0
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            logger.warning("The session that listens for results is lost: %s", one_line(error))
        is_given_up = time.monotonic() - self._lost_at > LONGEST_OUTAGE
        self._tell([id_ for id_ in self._waiting if is_given_up or id_ not in present], error)
        if self._waiting:
            self._failures += 1
            self._waker.wait(pause_after(self._failures))

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(*CONNECTION_ERRORS):
                connection.close()
            del connections[self.using]


@contextmanager
def _limited(connection: DatabaseWrapper | None) -> Iterator[None]:
    """Shut the connection down if this block takes too long, so that its statement fails."""
    timer = threading.Timer(STATEMENT_TIMEOUT, shut_down_socket, [connection])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_listeners: dict[str, _Listener] = {}
#: Held while a thread ends and while a waiter joins, so that no waiter joins a thread that is about to end.
_guard = threading.Lock()


def _reset_after_fork() -> None:
    # A forked process has neither the threads nor the waiters.
    global _guard
    _guard = threading.Lock()
    _listeners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
