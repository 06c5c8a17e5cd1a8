"""A lock of one thread, on its Django connection: acquires and releases the lock, and notices its loss.

The scopes:

- *session*: held by the database session until it is freed. If the session has ended at the release, or PostgreSQL
  reports that the session did not hold the lock, the lock was lost and ``LockLost`` is raised.
- *transaction*: held by the transaction, and freed by PostgreSQL with COMMIT or ROLLBACK, not by this package. So the
  next holder sees the committed changes. A rollback to a savepoint before the lock frees it, too. The handle is true
  until then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db import Error as DatabaseFailure
from django.db import connections
from django.utils.asyncio import async_unsafe
from psycopg import Error as PsycopgError
from psycopg.pq import TransactionStatus

from django_pglock.conf import get_settings
from django_pglock.errors import LockError
from django_pglock.keys import Key
from django_pglock.locks.base_handle import NOT_HELD_BY_SESSION, BaseHandle, first_line
from django_pglock.locks.connection_hooks import keep_out_of_pool, session_locks_of
from django_pglock.locks.options import Options
from django_pglock.locks.own_transaction import OwnTransaction
from django_pglock.locks.session_locks import LockRecord, RecordState, SessionLocks
from django_pglock.locks.statements.session_scope import acquire_session_locks, free_after_error, free_statement
from django_pglock.locks.statements.steps import END_SESSION, Busy, Row, StaleSnapshot, Steps, run_steps
from django_pglock.locks.statements.timeouts import BACK_TO_SAVEPOINT
from django_pglock.locks.statements.transaction_scope import acquire_transaction_locks
from django_pglock.postgres.connections import (
    connection_for,
    ensure_usable,
    has_ended,
    has_session_ended,
    in_test_case,
    in_transaction,
    transaction_status,
)
from django_pglock.postgres.exchange import exchange
from django_pglock.postgres.message import send_in_session
from django_pglock.postgres.stopping import check, stopping_wrapper

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper


class Handle(BaseHandle):
    """A lock of this thread."""

    _connection: DatabaseWrapper

    def __init__(self, keys: Sequence[Key], options: Options) -> None:
        super().__init__(keys, options)
        self._thread = threading.get_ident()
        self._own_transaction: OwnTransaction | None = None

    # Acquire

    @async_unsafe("Acquiring a lock blocks the event loop here. Use 'async with', or await its aacquire().")
    def acquire(self, *, may_begin: bool) -> Handle:
        """Acquire the lock. ``may_begin``: the caller will also call ``release``, so the lock may open a transaction.

        Raises ``LockNotAvailable`` if the lock is busy for longer than the timeout, and ``LockScopeError`` if it would
        not protect. Other errors are passed on. After each error nothing is held.
        """
        if self.is_disabled:
            self._acquire_disabled()
            return self
        connection = self._connection = connection_for(self.using)
        ensure_usable(connection)
        inside = in_transaction(connection)
        self.scope = self._choose_scope(inside=inside, may_begin=may_begin)
        locks = session_locks_of(connection)
        if not self.options.reentrant and not locks.numbers(connection).isdisjoint(self.keys):
            raise self._error(LockError, "is already held by this thread")
        try:
            if self.scope == "transaction" and not inside:
                own = self._own_transaction = OwnTransaction(connection)
                self._free_if_dropped(partial(_abandon, own, self._thread))
                own.begin()
            self._acquire(connection, locks)
        except BaseException as error:
            self._undo(error)
            raise
        return self

    def _choose_scope(self, *, inside: bool, may_begin: bool) -> str:
        """Return the scope. Raises ``LockScopeError`` if the scope would not protect in this situation."""
        scope = self.options.scope or get_settings().SCOPE
        if scope == "auto":
            if not inside and self.options.using is None and len(connections.settings) > 1:
                self._refuse_foreign_transaction()
            return "transaction" if inside else "session"
        if scope == "session" and inside:
            raise self._scope_error(
                "a session lock inside a transaction would be released before the commit, and the next holder "
                "would read old data. Take the lock outside the block, or use scope='transaction'"
            )
        if scope == "transaction" and not inside and not may_begin:
            raise self._scope_error(
                "a transaction lock without a transaction is released immediately. Use it inside atomic(), or in a "
                "with statement, which opens one"
            )
        return scope

    def _refuse_foreign_transaction(self) -> None:
        """Raise ``LockScopeError`` inside ``atomic()`` of another database: it is not clear which one is meant."""
        other: Any
        for other in connections.all(initialized_only=True):
            if other.alias != self.using and other.in_atomic_block and in_transaction(other):
                raise self._scope_error(
                    f"it would be released before the COMMIT of atomic(using={other.alias!r}), because locks are taken "
                    f"on {self.using!r}. Take the lock outside the block, or name the database: with "
                    f"using={other.alias!r} it lasts until that COMMIT, with using={self.using!r} until the end of "
                    "the with block"
                )

    def _acquire(self, connection: DatabaseWrapper, locks: SessionLocks) -> None:
        if stopping_wrapper in connection.execute_wrappers:
            check()
        began = time.monotonic()
        request = self._build_request(partial(locks.numbers, connection))
        record = self._record = LockRecord(locks, request, self.scope, connection.connection)
        locks.add(record, connection)
        if self.scope == "session":
            self._free_if_dropped(self._warn_and_free(partial(locks.free_from_any_thread, record)))
            keep_out_of_pool(connection)
        try:
            row = run_steps(self._steps(connection, record), partial(_send, connection, record))
        except Busy as busy:
            locks.remove(record)
            self.waited = time.monotonic() - began
            raise self._busy_error(busy.__cause__) from busy.__cause__
        except StaleSnapshot:
            locks.remove(record)
            raise (self._stale_error() if self._own_transaction is None else self._own_stale_error()) from None
        self.waited = time.monotonic() - began
        self._note_granted(record, row or ())
        record.state = RecordState.HELD
        self._announce_acquired()

    def _steps(self, connection: DatabaseWrapper, record: LockRecord) -> Steps:
        if record.scope == "transaction":
            return acquire_transaction_locks(record.request)
        return acquire_session_locks(record.request, in_test=connection.in_atomic_block)

    def _undo(self, error: BaseException) -> None:
        """Free the lock after an error in the middle of an acquire or a release."""
        self.is_open = False
        record = self._record
        if record is not None and record.state is not RecordState.ENDED:
            _free_after_error(self._connection, record, error)
        if self._own_transaction is not None:
            self._own_transaction.end(error)
            self._own_transaction = None
        self._stop_watch()

    # Hold

    @property
    def is_held(self) -> bool:
        record = self._record
        if record is None or record.state is not RecordState.HELD:
            return self.is_open and self.scope == "disabled"
        raw = record.raw
        # A session that was returned to a pool may have another user now.
        if self._connection.connection is not raw or raw.closed:
            return False
        if record.scope == "transaction" and raw.pgconn.transaction_status == TransactionStatus.IDLE:
            return False
        return self.is_open or record.scope == "transaction"

    def _lost_reason(self) -> str:
        record = self._record
        if record is not None and record.scope == "transaction" and not self.is_held:
            return "its transaction, or the savepoint before it, has ended"
        is_there = record is not None and self._connection.connection is record.raw and not has_ended(record.raw)
        return "" if is_there and self.is_held else "its session has ended"

    # Release

    def release(self, error: BaseException | None = None) -> None:
        """Release the lock. A transaction lock stays until the end of its transaction.

        ``error`` is the exception of the body, if there is one. Then a lost lock is logged instead of raised, so that
        the first cause stays visible. Raises ``LockLost``, and ``LockError`` in another thread or if the lock is not
        held.
        """
        if threading.get_ident() != self._thread:
            raise self._error(LockError, "belongs to another thread")
        if not self.is_open:
            raise self._error(LockError, "is not held")
        if self._record is not None:
            try:
                self._release(self._record, error)
            except BaseException as interruption:
                self._undo(interruption)
                raise
        self._stop_watch()
        self.is_open = False
        self._announce_released()

    def _release(self, record: LockRecord, error: BaseException | None) -> None:
        if self.scope == "session":
            reason = self._free(record)
            if reason is not None:
                self._report_lost(reason, error)
        elif (
            record.request.max_hold is not None and record.raw is self._connection.connection and has_ended(record.raw)
        ):
            # COMMIT would fail, too. Its error, of the server or of a pooler, does not name the lock.
            self._report_lost("its session has ended", error)
        if self._own_transaction is not None:
            self._end_own_transaction(self._own_transaction, record, error)

    def _end_own_transaction(self, own: OwnTransaction, record: LockRecord, error: BaseException | None) -> None:
        try:
            own.end(error)
        except DatabaseFailure as failed:
            if not has_ended(record.raw):
                raise
            self._report_lost(f"its session has ended ({first_line(failed)})", error, cause=failed)
        self._own_transaction = None

    def _free(self, record: LockRecord) -> str | None:
        """Free the session lock. Return why that was not possible, or None."""
        connection, locks = self._connection, record.locks
        if connection.connection is not record.raw or record.state is RecordState.ENDED:
            locks.free_from_any_thread(record)
            return "its connection was closed"
        try:
            row = _send(connection, record, free_statement(record.request, locks.limits_without(record)))
        except DatabaseFailure as error:
            if not has_session_ended(connection):
                # The caller's transaction is broken. After its rollback the lock can be freed.
                locks.free_from_any_thread(record)
                return None
            _close_session(connection)
            locks.remove(record)
            return f"its session has ended ({first_line(error)})"
        locks.remove(record)
        return None if row and row[0] else NOT_HELD_BY_SESSION

    def free_from_any_thread(self) -> None:
        self.is_open = False
        record = self._record
        if record is not None and record.scope == "session":
            record.locks.free_from_any_thread(record)
        if self._own_transaction is not None:
            _abandon(self._own_transaction, self._thread)
        self._stop_watch()


def _abandon(own: OwnTransaction, thread: int) -> None:
    own.abandon(is_here=threading.get_ident() == thread)


def _free_after_error(connection: DatabaseWrapper, record: LockRecord, error: BaseException) -> None:
    """Ensure that no lock of a record stays held, whatever the state of the session is."""
    locks = record.locks
    if record.raw is connection.connection and record.raw.lock.locked():
        # The exception was raised while psycopg's lock was held, so no code can use the connection any more.
        if in_test_case(connection):
            record.raw.lock.release()
        else:
            _close_session(connection)
    if record.request.max_hold is not None and record.scope == "session" and not isinstance(error, DatabaseFailure):
        # After an error of the server, the session's limits are restored. After any other error they are not known.
        _send(connection, record, END_SESSION)
    left = record.left_after_error
    if left is not None and record.raw is connection.connection:
        if not _is_usable_again(connection):
            locks.free_from_any_thread(record)
            return
        others = locks.numbers(connection, without=record)
        run_steps(free_after_error(left, others=others), partial(_send, connection, record))
    if record not in locks.pending:
        locks.remove(record)


def _is_usable_again(connection: DatabaseWrapper) -> bool:
    """Roll back to the savepoint before our wait, if the caller's transaction was aborted after it."""
    if transaction_status(connection) != TransactionStatus.INERROR:
        return True
    try:
        exchange(connection.connection, BACK_TO_SAVEPOINT)
    except PsycopgError:
        return False
    return True


def _send(connection: DatabaseWrapper, record: LockRecord, statement: str) -> Row | None:
    """Send a statement about a record and return the row of its answer. For ``END_SESSION``, end the session."""
    if statement != END_SESSION:
        try:
            return send_in_session(connection, record.locks.comment(without=record) + statement)
        finally:
            if record.locks.pending:
                record.locks.free_pending()
    if in_test_case(connection):
        # If the connection were closed, later tests would fail.
        record.locks.free_from_any_thread(record)
        return None
    _close_session(connection)
    return None


def _close_session(connection: DatabaseWrapper) -> None:
    """End the session. A transaction around the lock fails as after each lost connection."""
    raw: Any = connection.connection
    if raw is not None:
        raw.pgconn.finish()
    connection.close()
