"""The handles of locks: what all of them share, and the lock of one thread, on its Django connection.

The scopes:

- *session*: held by the database session until it is freed. If the session has ended at the release, or PostgreSQL
  reports that the session did not hold the lock, the lock was lost and ``LockLost`` is raised.
- *transaction*: held by the transaction, and freed by PostgreSQL with COMMIT or ROLLBACK, not by this package. So the
  next holder sees the committed changes. A rollback to a savepoint before the lock frees it, too. The handle is true
  until then.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from weakref import ref

from django.db import Error as DatabaseFailure
from django.db import connections, transaction
from django.utils.asyncio import async_unsafe
from psycopg import Error as PsycopgError
from psycopg.pq import TransactionStatus

from django_pglock import signals
from django_pglock.conf import get_settings
from django_pglock.errors import LockError, LockLost, LockNotAvailable, LockScopeError
from django_pglock.locks import statements as sql
from django_pglock.locks.request import Request
from django_pglock.locks.session_locks import (
    LockRecord,
    RecordState,
    SessionLocks,
    keep_out_of_pool,
    session_locks_of,
)
from django_pglock.locks.statements import Busy, StaleSnapshot
from django_pglock.loggers import get_logger
from django_pglock.postgres.connections import (
    connection_for,
    end_session,
    ensure_usable,
    has_commit_hooks,
    has_ended,
    has_session_ended,
    in_test_case,
    in_transaction,
    shut_down_socket,
    transaction_status,
)
from django_pglock.postgres.exchange import exchange
from django_pglock.postgres.message import send_in_session
from django_pglock.postgres.stopping import check, stopping_wrapper

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

logger = get_logger("django_pglock.locks")
E = TypeVar("E", bound=LockError)
#: A hold is slow after this multiple of a slow wait: a lock is there to work under it.
SLOW_HOLD = 10
#: The reason if another statement has freed a session lock.
NOT_HELD_BY_SESSION = "PostgreSQL reports that this session did not hold it"


class BaseHandle:
    """One use of a lock: acquire, hold, release. True while the lock is held.

    ``waited`` is the number of seconds that the acquire took. ``token`` is None: only a lease has a fencing token.

    The handle owns the lock: if the handle is dropped without ``release()``, the lock is freed, and this is logged. A
    weak reference notices this, and ``release()`` removes its callback. A ``__del__`` would run for each handle, and an
    exception that a signal handler raises there, such as a time limit or Ctrl-C, would vanish.
    """

    token: int | None = None
    #: Set by ``django_pglock.testing.locks_disabled``: each acquire succeeds without a statement to PostgreSQL.
    is_disabled: ClassVar[bool] = False
    #: The noun for messages.
    _noun = "Lock"
    #: The model whose rows have the holder.
    _model = "AdvisoryLock"
    #: Seconds after which a wait is slow; 0: as the setting says.
    _slow_wait = 0.0
    scope = ""
    waited = 0.0
    #: Acquired, and not yet released by its user.
    is_open = False
    _since = 0.0
    #: Why the lock was lost, if it was.
    _reason = ""
    #: The session's record of a session lock; None until it is requested.
    _record: LockRecord | None = None
    _watch: ref[BaseHandle] | None = None

    def __init__(self, request: Request) -> None:
        self.request = request
        self.using = request.using or get_settings().USING

    def __bool__(self) -> bool:
        return self.is_held

    def _free_if_dropped(self, free: Callable[[], object], *, is_silent: bool = False) -> None:
        """Call ``free`` if this handle is dropped before ``_stop_watch``. ``free`` must not refer to the handle."""
        noun = "" if is_silent else self._noun
        watch = ref(self, partial(_free_dropped, os.getpid(), noun, self.request, self._record, free))
        if self._watch is not None:
            self._stop_watch()
        self._watch = watch
        _watches[id(watch)] = watch

    def _stop_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            _watches.pop(id(watch), None)

    @property
    def is_held(self) -> bool:
        """Whether the lock is held now."""
        return self.is_open

    @property
    def is_done(self) -> bool:
        """Whether the lock was acquired and has been released."""
        return self._since > 0 and not self.is_open

    def free_from_any_thread(self) -> None:
        """Free the lock without a wait, in any thread or coroutine, if its owner cannot release it."""
        raise NotImplementedError

    def release_from_any_thread(self) -> None:
        """Do the same, and report the end of the lock as ``release`` does. If the lock was lost, this is logged."""
        reason = "" if self.scope == "disabled" else self._lost_reason()
        self.free_from_any_thread()
        if reason:
            logger.error("%s", self._announce_lost(reason))
        self._announce_released()

    def __repr__(self) -> str:
        state = "held" if self.is_held else "not held"
        return f"<{self._noun} {self.name!r} {self.scope or 'of no scope yet'} {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Raise ``TypeError``. A copy would free the lock when Python deletes the copy."""
        raise TypeError(
            f"{self._noun} {self.name!r} cannot be copied or pickled, because its handle owns it. Pass its name."
        )

    @property
    def key(self) -> int:
        """The number that PostgreSQL locks; the first one of several."""
        return self.request.keys[0].number

    @property
    def keys(self) -> tuple[int, ...]:
        """All numbers, in the order in which they are locked."""
        return self.request.numbers

    @property
    def name(self) -> str:
        """The name for people. Several names are joined by commas."""
        return self.request.name

    @property
    def held_for(self) -> float:
        """Seconds since the acquire."""
        return time.monotonic() - self._since

    def _note_granted(self, row: Sequence[Any]) -> None:
        """Store the columns of the server's answer: the slot of a semaphore, or the idle limits before ``max_hold``."""
        record = self._record
        if self.request.queue is not None:
            self.request = self.request.only(row[0])
            if record is not None:
                record.request = self.request
        elif record is not None and self.request.max_hold is not None:
            record.locks.remember_limits(record, row[1:3])

    def _refuse_held_slots(self, held: frozenset[int]) -> None:
        """Raise ``LockError`` if all slots of a semaphore are held already, by the same thread or coroutine."""
        if not self.request.without(held).keys:
            raise LockError(f"This session already holds all slots of {self.name!r}.", name=self.name, key=self.key)

    def _acquire_disabled(self) -> None:
        self.scope = "disabled"
        self._announce_acquired()

    # Log records, signals, errors

    def _announce_acquired(self) -> None:
        self.is_open = True
        self._since = time.monotonic()
        self._log("Acquired", "waited", self.waited, self._slow_wait or get_settings().SLOW_LOCK)
        signals.lock_acquired.send_robust(type(self), handle=self)

    def _announce_released(self) -> None:
        held = time.monotonic() - self._since
        self._log("Released", "held", held, SLOW_HOLD * get_settings().SLOW_LOCK)
        signals.lock_released.send_robust(type(self), handle=self, held=held)

    def _log(self, verb: str, what: str, seconds: float, limit: float) -> None:
        is_slow = seconds >= limit
        level = logging.WARNING if is_slow else logging.DEBUG
        if logger.isEnabledFor(level):
            text = "%s %s %r after %.3f s" + (", which is longer than %g s." if is_slow else ".")
            values = (verb, self._noun.lower(), self.name, seconds, *([limit] if is_slow else []))
            logger.log(level, text, *values, extra={"lock": self.name, "key": self.key, what: seconds})

    def _busy_error(self, cause: BaseException | None) -> LockNotAvailable:
        """Report that the lock is busy, and return the error. ``cause`` is the server's error, if there is one."""
        timeout = self.request.timeout
        waited = "" if not timeout else f" within {timeout:g} s"
        error = LockNotAvailable(
            f"{self._noun} {self.name!r} has another holder and was not granted{waited}.",
            name=self.name,
            key=self.key,
            timeout=timeout,
            keys=self.keys,
            names=[key.name for key in self.request.keys],
            using=self.using,
            model=self._model,
            sqlstate=getattr(getattr(cause, "__cause__", None), "sqlstate", None),
        )
        error.__cause__ = cause
        logger.info("%s", error, extra={"lock": self.name, "key": self.key, "waited": self.waited})
        signals.lock_busy.send_robust(type(self), handle=self, waited=self.waited)
        return error

    def _report_lost(self, reason: str, error: BaseException | None, *, cause: BaseException | None = None) -> None:
        """Report a lost lock: raise ``LockLost``, or only log it if the body has already raised ``error``."""
        lost = self._announce_lost(reason)
        if error is None:
            lost.__cause__ = cause
            raise lost
        logger.error("%s", lost)

    def _announce_lost(self, reason: str) -> LockLost:
        """Send the signal of a lost lock, and return the error that says so."""
        self._reason = reason
        signals.lock_lost.send_robust(type(self), handle=self, held=self.held_for)
        return self._lost_error(reason)

    def assert_held(self) -> None:
        """Raise ``LockLost`` if the lock was released, or its session or transaction has ended."""
        if self.scope == "disabled" and self.is_open:
            return
        if not self.is_open and not self._reason and not self.is_held:
            what = "was released" if self._since else "was never acquired"
            raise self._error(LockLost, f"is not held: it {what}")
        if reason := self._lost_reason():
            raise self._lost_error(self._reason or reason)

    def _lost_reason(self) -> str:
        """Return why the lock is no longer held, as far as this is known; an empty string if it is held."""
        raise NotImplementedError

    def _lost_error(self, reason: str) -> LockLost:
        text = f"was lost before it was released: {reason}. Another session may have held it since then"
        return self._error(LockLost, text)

    def _scope_error(self, reason: str) -> LockScopeError:
        return self._error(LockScopeError, f"was not taken: {reason}")

    def _error(self, kind: type[E], text: str) -> E:
        return kind(f"{self._noun} {self.name!r} {text}.", name=self.name, key=self.key)


#: The weak references of ``_free_if_dropped``, by ``id()``: whatever happens to the handle, its reference stays alive.
_watches: dict[int, ref[BaseHandle]] = {}


def _free_dropped(
    process: int,
    noun: str,
    request: Request,
    record: LockRecord | None,
    free: Callable[[], object],
    watch: ref[BaseHandle],
) -> None:
    _watches.pop(id(watch), None)
    # In a process that was forked from the holder's, the lock is the parent's.
    if process != os.getpid() or sys.is_finalizing():
        return
    if record is not None and (record.state is RecordState.ENDED or record in record.locks.pending):
        return
    if noun:
        logger.warning(
            "%s %r was released because its handle was deleted without release(). Keep the handle as long as the lock "
            "is needed.",
            noun,
            request.name,
        )
    free()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, because PostgreSQL's messages have details below it."""
    return next(iter(str(error).strip().splitlines()), "no answer")


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
                self._free_if_dropped(own.abandon, is_silent=True)
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
            row = sql.run_steps(steps, partial(_send, connection, self._record))
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
        if self._own_transaction is None:
            return self._scope_error(
                "at REPEATABLE READ or SERIALIZABLE the snapshot is older than the lock, so queries do not see what "
                "the last holder committed. Take the lock outside the transaction, or pass stale_ok=True"
            )
        return self._scope_error(
            "the transaction that it opens is REPEATABLE READ or SERIALIZABLE, by OPTIONS['isolation_level'] or by "
            "default_transaction_isolation, so its snapshot is older than the lock, and queries do not see what the "
            "last holder committed. Use scope='session', make READ COMMITTED the default, or pass stale_ok=True if the "
            "block reads nothing"
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
            _send(connection, record, sql.END_SESSION)
        elif transaction_status(connection) == TransactionStatus.INERROR:
            # The caller's transaction was aborted after our savepoint. If it has none, a rollback will end it.
            with suppress(PsycopgError):
                exchange(raw, sql.BACK_TO_SAVEPOINT)

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
        # A session that was returned to a pool may have another user now.
        return self._raw is not None and self._connection.connection is self._raw and not self._raw.closed

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
        return "" if self.is_held and not has_ended(self._raw) else "its session has ended"

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
        if self.request.max_hold is not None and raw is self._connection.connection and has_ended(raw):
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
            shut_down_socket(self._connection)

    def _is_over(self) -> bool:
        connection = self._connection
        if connection.connection is None:
            return True
        is_idle = transaction_status(connection) in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN)
        return is_idle and not connection.in_atomic_block and connection.autocommit


def _send(connection: DatabaseWrapper, record: LockRecord | None, statement: str) -> sql.Row | None:
    """Send a statement and return the row of its answer. For ``sql.END_SESSION``, end the session with its locks."""
    if statement != sql.END_SESSION:
        return send_in_session(connection, statement)
    if not in_test_case(connection):
        _close_session(connection)
    elif record is not None:
        # If the connection were closed, later tests would fail.
        record.locks.free_from_any_thread(record)
    return None


def _close_session(connection: DatabaseWrapper) -> None:
    """End the session. A transaction around the lock fails as after each lost connection."""
    raw: Any = connection.connection
    if raw is not None:
        raw.pgconn.finish()
    connection.close()
