"""The thread in which Django's ORM runs for the coroutines of a worker.

Django's connections belong to a thread, and asgiref runs the functions that coroutines pass to ``sync_to_async`` in one
thread of their loop. All coroutines share this thread and its connections. So the thread records for which attempt it
works. This is needed to cancel only the SQL of a task whose time is over, to log which task delays the others, and to
close a connection that a task has left in a transaction, because all coroutines share the connection.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psycopg
from django.db import connections

from django_pglock.loggers import WORKER, get_logger
from django_pglock.postgres.connections import cancel_statement, shut_down_socket
from django_pglock.postgres.stopping import current_attempt
from django_pglock.worker.child.attempt import Attempt
from django_pglock.worker.child.task_connections import (
    expect_next_task,
    in_manual_transaction,
    is_closed,
    is_reusable,
)

logger = get_logger(WORKER)

#: Seconds for which one function may delay others before this is logged.
OCCUPIED_FOR = 10.0
#: Seconds after which it is logged again.
REPEAT_AFTER = 60.0


class OrmThread(ThreadPoolExecutor):
    """An executor of one thread, which calls ``prepare`` first."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        super().__init__(1, thread_name_prefix="lockworker-orm", initializer=self._begin)
        self._prepare = prepare
        #: The ident of the thread, once it has started.
        self.ident: int | None = None
        #: The attempt for which the thread works now, and since when, by time.monotonic().
        self.attempt: Attempt | None = None
        self.since = 0.0
        self._connections: Sequence[Any] = ()
        #: The attempt of the last call.
        self._last: Attempt | None = None
        self._closing: Future[None] | None = None
        self._cancelling = threading.Lock()
        # Counted up in the loop's thread and down in this one.
        self._waiting = 0
        self._counting = threading.Lock()
        self._is_watched = False
        # By alias: the attempt that has begun the open transaction.
        self._open: dict[str, Attempt | None] = {}

    def _begin(self) -> None:
        self._prepare()
        self._connections = connections.all(initialized_only=True)
        self.ident = threading.get_ident()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function in this thread for the attempt of the calling coroutine. Called in the loop's thread."""
        with self._counting:
            self._waiting += 1
        if self._waiting > 1 and not self._is_watched:
            self._watch(OCCUPIED_FOR)
        future = super().submit(self._run, current_attempt.get(), function, args, kwargs)
        future.add_done_callback(self._note_end)
        return future

    def _note_end(self, future: Future[Any]) -> None:
        with self._counting:
            self._waiting -= 1

    def close(self) -> None:
        """Make the thread end after its present call, and close its connections."""
        self._closing = super().submit(connections.close_all)
        self.shutdown(wait=False)

    @property
    def is_closed(self) -> bool:
        """Whether, after ``close()``, the connections are closed."""
        return self._closing is None or self._closing.done()

    def _run(self, attempt: Attempt | None, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.attempt, self.since = attempt, time.monotonic()
        if attempt is not self._last:
            self._last = attempt
            expect_next_task(self._connections)
        try:
            return function(*args, **kwargs)
        finally:
            # Under the lock, so that no cancel() that has read this attempt is still in progress.
            with self._cancelling:
                self.attempt = None
            self._note_transactions(attempt)
            if attempt is not None and attempt.is_over:
                self._close_transactions_of(attempt)

    # Transactions that a task has left open

    def end(self, attempt: Attempt) -> None:
        """Close the connections that an ended attempt has left in a transaction. Does not wait."""
        attempt.is_over = True
        if attempt in self._open.values():
            super().submit(self._close_transactions_of, attempt)

    def _note_transactions(self, attempt: Attempt | None) -> None:
        all_: Sequence[Any] = connections.all(initialized_only=True)
        open_ = [each.alias for each in all_ if not is_reusable(each) or in_manual_transaction(each)]
        if open_ or self._open:
            self._open = {alias: self._open.get(alias, attempt) for alias in open_}

    def _close_transactions_of(self, attempt: Attempt) -> None:
        for alias in [alias for alias, each in self._open.items() if each is attempt]:
            del self._open[alias]
            connection: Any = connections[alias]
            if connection.in_atomic_block or not (is_closed(connection) or in_manual_transaction(connection)):
                logger.warning(
                    "%s has left a transaction open in database %r. Its changes, and those of coroutines that ran "
                    "since then, are rolled back.",
                    attempt.claim,
                    alias,
                    extra=attempt.claim.log_fields(),
                )
            connection.in_atomic_block = False  # otherwise close() only notes that it was called
            connection.close()

    # Functions that take too long

    def cancel(self, attempt: Attempt) -> None:
        """Cancel the statement that runs for an attempt. Waits for the server, so it must not be called in the loop."""
        with self._cancelling:
            if self.attempt is not attempt:
                return
            for connection in self._connections:
                if connection.vendor == "postgresql":
                    _cancel(connection, attempt)

    def _watch(self, seconds: float) -> None:
        self._is_watched = True
        asyncio.get_running_loop().call_later(seconds, self._report_wait)

    def _report_wait(self) -> None:
        """Log which task delays other calls. Check again as long as calls wait."""
        self._is_watched = False
        attempt, took = self.attempt, time.monotonic() - self.since
        if self._waiting < 2 or attempt is None:
            return
        if took >= OCCUPIED_FOR:
            logger.warning(
                "%s has used the thread that runs the ORM for coroutines for %.0f s. %d calls wait for this thread.",
                attempt.claim,
                took,
                self._waiting - 1,
                extra=attempt.claim.log_fields(),
            )
        self._watch(REPEAT_AFTER if took >= OCCUPIED_FOR else OCCUPIED_FOR - took)


def _cancel(connection: Any, attempt: Attempt) -> None:
    try:
        cancel_statement(connection)
    except psycopg.Error as error:
        logger.warning("A statement of %s could not be cancelled: %s", attempt.claim, error)
        shut_down_socket(connection)
