"""A lock of one thread, on its Django connection.

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
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db import Error as DatabaseFailure
from django.db import connections, transaction
from django.utils.asyncio import async_unsafe
from psycopg import Error as PsycopgError
from psycopg.pq import TransactionStatus

from django_pglock.conf import get_settings
from django_pglock.errors import LockError
from django_pglock.locks import statements as sql
from django_pglock.locks.base_handle import NOT_HELD_BY_SESSION, BaseHandle, first_line
from django_pglock.locks.request import Request
from django_pglock.locks.session_locks import (
    LockRecord,
    RecordState,
    SessionLocks,
    keep_out_of_pool,
    session_locks_of,
)
from django_pglock.locks.statements import Busy, StaleSnapshot
from django_pglock.postgres.connections import (
    connection_for,
    end_session,
    ensure_usable,
    has_commit_hooks,
    has_ended,
    has_session_ended,
    in_test_case,
    in_transaction,
    leave_blocks,
    shut_down_socket,
    transaction_status,
)
from django_pglock.postgres.exchange import exchange
from django_pglock.postgres.message import send_in_session
from django_pglock.postgres.stopping import check, stopping_wrapper

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper


class Handle(BaseHandle):
    """A lock of this thread."""

    _thread = 0
    _connection: DatabaseWrapper
    #: The psycopg connection of the session with the lock; None if it was not granted.
    _raw: Any = None
    #: Whether the transaction has lost the lock.
    _is_over = False
    #: The connection's list of functions after the commit, at the last moment at which a transaction lock was held.
    #: Django makes another list at each COMMIT, and at each rollback, also to a savepoint.
    _hooks: Any = None
    _own_transaction: OwnTransaction | None = None

    # Acquire

    @async_unsafe("Acquiring a lock blocks the event loop here. Use 'async with', or await its aacquire().")
    def acquire(self, *, may_begin: bool) -> Handle:
        """Acquire the lock. ``may_begin``: the caller will also call ``release``, so the lock may open a transaction.

        Raises ``LockNotAvailable`` if the lock is busy for longer than the timeout, and ``LockScopeError`` if it would
        not protect. Other errors are passed on. After each error nothing is held.
        """
        if self.is_disabled:
            self._thread = threading.get_ident()
            self._acquire_disabled()
            return self
        self._thread = threading.get_ident()
        connection = self._connection = connection_for(self.using)
        ensure_usable(connection)
        inside = in_transaction(connection)
        self.scope = self._choose_scope(inside=inside, may_begin=may_begin)
        locks = session_locks_of(connection)
        if (
            not self.request.reentrant
            and send_in_session(connection, sql.holds_any_statement(self.request)) is not None
        ):
            raise self._error(LockError, "is already held by this thread")
        try:
            if self.scope == "transaction" and not inside:
                own = self._own_transaction = OwnTransaction(connection)
                self._free_if_dropped(own.abandon)
                own.begin()
            self._acquire(connection, locks)
        except BaseException as error:
            self._undo(error)
            raise
        return self

    def _choose_scope(self, *, inside: bool, may_begin: bool) -> str:
        """Return the scope. Raises ``LockScopeError`` if the scope would not protect in this situation."""
        scope = self.request.scope or get_settings().SCOPE
        if scope == "auto":
            if not inside and self.request.using is None and len(connections.settings) > 1:
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
        request = self.request
        if request.queue is not None:
            # PostgreSQL would grant the session's slots again, and the count would be wrong.
            self._refuse_held_slots(locks.numbers())
            request = request.without(locks.numbers())
        self._raw, self._hooks = connection.connection, connection.run_on_commit
        self._add_record(connection, locks, request)
        began = time.monotonic()
        try:
            in_test = connection.in_atomic_block
            inside = in_test or (request.queue is not None and in_transaction(connection))
            steps = sql.acquire(request, self.scope, inside=inside, in_test=in_test)
            row = sql.run_steps(steps, partial(send_in_session, connection), self._end_session)
        except (Busy, StaleSnapshot) as failed:
            self._raw = None
            if self._record is not None:
                locks.remove(self._record)
            self.waited = time.monotonic() - began
            raise self._not_granted(failed) from failed.__cause__
        self.waited = time.monotonic() - began
        if request.queue is not None or request.max_hold is not None:
            self._note_granted(row or ())
        if self.scope == "session":
            self._record.state = RecordState.HELD  # type: ignore[union-attr]
        elif self._record is not None:
            locks.remove(self._record)
        self._announce_acquired()

    def _add_record(self, connection: DatabaseWrapper, locks: SessionLocks, request: Request) -> None:
        """Add a record of the session locks that an exception could leave in the session, before they are requested."""
        if self.scope == "transaction" and request.queue is None:
            return
        if request.queue is not None:
            keys = (request.queue,) if self.scope == "transaction" else (*request.keys, request.queue)
            request = request._replace(keys=keys)
        record = self._record = LockRecord(locks, request, self._raw)
        locks.add(record)
        if self.scope == "session":
            self._free_if_dropped(partial(locks.free_from_any_thread, record))
            keep_out_of_pool(connection)

    def _not_granted(self, failed: Busy | StaleSnapshot) -> LockError:
        if isinstance(failed, Busy):
            return self._busy_error(failed.__cause__)
        which, instead = "the transaction", "Take the lock outside the transaction"
        if self._own_transaction is not None:
            which, instead = "the transaction that it opens", "Use scope='session', make READ COMMITTED the default"
        return self._scope_error(
            f"{which} is REPEATABLE READ or SERIALIZABLE. So its snapshot is older than the lock, and queries do not "
            f"see what the last holder committed. {instead}, or pass stale_ok=True"
        )

    def _undo(self, error: BaseException) -> None:
        """Free the lock after an error in the middle of an acquire or a release."""
        self.is_open = False
        record, raw = self._record, self._raw
        is_open = raw is not None and raw is self._connection.connection
        if is_open:
            self._make_usable(record, error)
        if record is not None and record.state is not RecordState.ENDED:
            # The statement that was interrupted may have been executed.
            record.state = RecordState.REQUESTED
            (record.locks.free_from_any_thread if is_open else record.locks.remove)(record)
        self._raw = None
        if self._own_transaction is not None:
            self._own_transaction.end(error)
            self._own_transaction = None
        self._stop_watch()

    def _make_usable(self, record: LockRecord | None, error: BaseException) -> None:
        """End the session, or make it such that the locks of a record can be freed in it."""
        connection, raw = self._connection, self._raw
        if raw.lock.locked():
            # The exception was raised while psycopg's lock was held, so no code can use the connection any more.
            if in_test_case(connection):
                raw.lock.release()
            else:
                _close_session(connection)
        if record is None or record.state is RecordState.ENDED or raw is not connection.connection:
            return
        # After an error of the server, the session's limits are restored. After any other error they are not known.
        is_unknown = record.request.max_hold is not None and not isinstance(error, DatabaseFailure)
        # The server does not report how often the session holds a lock that another record has, too.
        is_unknown |= not record.locks.numbers(without=record).isdisjoint(record.request.numbers)
        if is_unknown or has_ended(raw):
            self._end_session()
        elif transaction_status(connection) == TransactionStatus.INERROR:
            # The caller's transaction was aborted after our savepoint. If it has none, a rollback will end it.
            with suppress(PsycopgError):
                exchange(raw, sql.BACK_TO_SAVEPOINT)

    def _end_session(self) -> sql.Row | None:
        """End the session, and its locks with it. There is no answer."""
        if not in_test_case(self._connection):
            _close_session(self._connection)
        elif self._record is not None:
            # If the connection were closed, later tests would fail.
            self._record.locks.free_from_any_thread(self._record)
        return None

    # Hold

    @property
    def is_held(self) -> bool:
        """Whether the lock is held now.

        After a COMMIT or a rollback, the server is asked whether the session still has a transaction lock.
        """
        if self.scope == "transaction":
            return self._is_in_transaction(asks=False)
        if self.scope == "disabled":
            return self.is_open
        record = self._record
        return self.is_open and record is not None and record.state is RecordState.HELD and self._has_session()

    def _has_session(self) -> bool:
        # A session that was returned to a pool may have another user now. After a fork, the parent has the session.
        return self._raw is not None and self._connection.connection is self._raw and not has_ended(self._raw)

    def _is_in_transaction(self, *, asks: bool) -> bool:
        """Return whether the transaction has the lock. ``asks``: ask the server, because SQL may have freed it."""
        if self._is_over:
            return False
        if self._has_session() and (status := self._raw.pgconn.transaction_status) != TransactionStatus.IDLE:
            connection = self._connection
            is_sure = connection.run_on_commit is self._hooks and has_commit_hooks(connection)
            # A broken transaction cannot be asked. It has its locks until its rollback.
            is_broken = status != TransactionStatus.INTRANS or connection.needs_rollback
            if is_broken or (is_sure and not asks) or self._holds_all():
                self._hooks = connection.run_on_commit
                return True
        self._is_over = True
        return False

    def _holds_all(self) -> bool:
        try:
            row = send_in_session(self._connection, sql.holds_all_statement(self.request))
        except DatabaseFailure:
            if not has_session_ended(self._connection):
                raise
            return False
        return bool(row and row[0])

    def _lost_reason(self) -> str:
        if self.scope == "transaction":
            is_held = self._is_in_transaction(asks=True)
            return "" if is_held else "its transaction, or the savepoint before it, has ended"
        return super()._lost_reason()

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
        try:
            if self.scope == "session":
                if reason := self._free(self._record):  # type: ignore[arg-type]
                    self._report_lost(reason, error)
            elif self.scope == "transaction":
                self._release_transaction_lock(error)
        except BaseException as interruption:
            self._undo(interruption)
            raise
        self._stop_watch()
        self.is_open = False
        self._announce_released()

    def _release_transaction_lock(self, error: BaseException | None) -> None:
        raw, own = self._raw, self._own_transaction
        if raw is not self._connection.connection or raw.closed:
            # Django does not COMMIT then, and raises no error.
            self._report_lost("its connection was closed", error)
        elif self.request.max_hold is not None and has_ended(raw):
            # COMMIT would fail, too. Its error, of the server or of a pooler, does not name the lock.
            self._report_lost("its session has ended", error)
        if own is not None:
            try:
                own.end(error)
            except DatabaseFailure as failed:
                if not has_ended(raw):
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
            limits = () if record.request.max_hold is None else locks.limits_without(record)
            row = send_in_session(connection, sql.free_statement(record.request, limits))
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
        if self._record is not None:
            self._record.locks.free_from_any_thread(self._record)
        if self._own_transaction is not None:
            self._own_transaction.abandon()
        self._stop_watch()


class OwnTransaction:
    """A transaction that a lock opens if the caller has none. If an exception interrupts it, it is ended."""

    def __init__(self, connection: DatabaseWrapper) -> None:
        self._connection = connection
        self._thread = threading.get_ident()
        self._atomic = transaction.atomic(using=connection.alias)
        # Inside of a TestCase it is a savepoint of the test's transaction.
        self._is_outermost = not connection.in_atomic_block

    def begin(self) -> None:
        """Begin the transaction."""
        self._atomic.__enter__()

    def end(self, error: BaseException | None) -> None:
        """Commit the transaction, or roll it back if there was an error."""
        try:
            if self._connection.atomic_blocks[-1:] == [self._atomic]:
                # Not by its truth: an exception with a length of 0 is false.
                kind, trace = (None, None) if error is None else (type(error), error.__traceback__)
                self._atomic.__exit__(kind, error, trace)
        finally:
            if self._is_outermost and not self._is_over():
                end_session(self._connection)

    def abandon(self) -> None:
        """End the transaction by ending its session, in any thread."""
        if not self._is_outermost or self._is_over():
            return
        if threading.get_ident() == self._thread:
            end_session(self._connection)
        else:
            # First, because the thread continues as soon as its statement has failed.
            leave_blocks(self._connection)
            shut_down_socket(self._connection)

    def _is_over(self) -> bool:
        connection = self._connection
        if connection.connection is None:
            return True
        is_idle = transaction_status(connection) in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN)
        return is_idle and not connection.in_atomic_block and connection.autocommit


def _close_session(connection: DatabaseWrapper) -> None:
    """End the session. A transaction around the lock fails as after each lost connection."""
    raw: Any = connection.connection
    if raw is not None:
        raw.pgconn.finish()
    connection.close()
