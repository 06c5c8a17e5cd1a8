"""A lock that is held: how it is taken, noticed when lost, and given back.

A handle belongs to the thread that took it. What the scopes mean:

- *session*: held by the database session until it is freed. The handle remembers the session; if that is gone at the
  end, or PostgreSQL says that the lock was not held, the lock was lost and ``LockLost`` says so.
- *transaction*: held by the transaction and freed by PostgreSQL with COMMIT or ROLLBACK, never by us: whoever comes
  next sees what was committed. A rollback to a savepoint before the lock frees it, too.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.db import Error as DatabaseFailure
from django.db import connections, transaction
from psycopg.errors import LockNotAvailable as ServerTimeout

from django_pglock import signals
from django_pglock.conf import get_settings
from django_pglock.db import connection_for, has_hung_up, in_atomic
from django_pglock.errors import LockError, LockLost, LockNotAvailable, LockScopeError
from django_pglock.keys import Key
from django_pglock.locks import statements

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

logger = logging.getLogger("django_pglock.locks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a lock is asked for. ``timeout`` is in seconds; None waits, 0 does not. ``scope`` None means the setting."""

    timeout: float | None = None
    shared: bool = False
    scope: str | None = None
    using: str | None = None
    reentrant: bool = True
    stale_ok: bool = False


class Handle:
    """A lock of this thread. True while it counts as held; ``waited`` is how many seconds it took to get it."""

    def __init__(self, key: Key, options: Options) -> None:
        self.key = key.number
        self.name = key.name
        self.using = options.using or get_settings().USING
        self.scope = ""
        self.waited = 0.0
        self._key = key
        self._options = options
        self._thread = threading.get_ident()
        self._is_held = False
        self._since = 0.0
        self._session: Any = None
        self._own_transaction: Any = None

    def __bool__(self) -> bool:
        return self._is_held

    def __repr__(self) -> str:
        return f"<Lock {self.name!r} {self.scope or 'of no scope yet'} {'held' if self._is_held else 'not held'}>"

    # Taking it

    def acquire(self, *, may_begin: bool) -> Handle:
        """Take the lock. ``may_begin``: the caller will also call ``release``, so a transaction may be opened for it.

        Raises ``LockNotAvailable`` when it is busy for longer than the timeout and ``LockScopeError`` where it would
        not protect; every other database error passes through, and nothing is held then.
        """
        connection = connection_for(self.using)
        connection.ensure_connection()
        self.scope = self._choose_scope(connection, may_begin=may_begin)
        self._refuse_stale_snapshot(connection)
        self._refuse_reentry(connection)
        if self.scope == "transaction" and not in_atomic(connection):
            self._own_transaction = transaction.atomic(using=self.using)
            self._own_transaction.__enter__()
        began = time.monotonic()
        try:
            is_granted = self._ask(connection)
        except BaseException as error:
            self._leave_transaction(error)
            raise
        self.waited = time.monotonic() - began
        if not is_granted:
            self._say_busy()
        self._note_held(connection)
        return self

    def _choose_scope(self, connection: DatabaseWrapper, *, may_begin: bool) -> str:
        scope = self._options.scope or get_settings().SCOPE
        inside = in_atomic(connection)
        if scope == "auto":
            return "transaction" if inside else "session"
        if scope == "session" and inside:
            raise self._wrong_scope(
                "a session lock inside atomic() would be freed before the commit, and whoever comes next would read "
                "old data. Take it outside the block, or use scope='transaction'"
            )
        if scope == "transaction" and not inside and not may_begin:
            raise self._wrong_scope(
                "a transaction lock without a transaction is gone at once. Use it inside atomic(), or in a with "
                "statement, which opens one"
            )
        if scope not in ("session", "transaction"):
            raise LockScopeError(f"There is no scope {scope!r}; use 'auto', 'session' or 'transaction'.")
        return scope

    def _refuse_stale_snapshot(self, connection: DatabaseWrapper) -> None:
        level = getattr(connection, "isolation_level", None)
        if self.scope == "transaction" and not self._options.stale_ok and level is not None and level > 2:
            raise self._wrong_scope(
                "at REPEATABLE READ or SERIALIZABLE the snapshot is older than the lock, so you would read what was "
                "there before the last holder committed. Take it outside atomic(), or pass stale_ok=True"
            )

    def _refuse_reentry(self, connection: DatabaseWrapper) -> None:
        if not self._options.reentrant and any(held.key == self.key for held in held_by(connection)):
            raise LockError(f"Lock {self.name!r} is held by this thread already.", name=self.name, key=self.key)

    def _wrong_scope(self, reason: str) -> LockScopeError:
        return LockScopeError(f"Lock {self.name!r} was not taken: {reason}.", name=self.name, key=self.key)

    def _ask(self, connection: DatabaseWrapper) -> bool:
        """Send the one statement; say whether the lock was granted."""
        options = self._options
        if options.timeout == 0:
            ask = statements.try_session if self.scope == "session" else statements.try_transaction
            return bool(_fetch(connection, ask(self._key, shared=options.shared)))
        milliseconds = None if options.timeout is None else max(1, round(options.timeout * 1000))
        wait = self._wait_session if self.scope == "session" else self._wait_transaction
        try:
            wait(connection, milliseconds)
        except DatabaseFailure as error:
            # Only our own limit makes "busy" of it: without one, the error is somebody else's lock_timeout.
            if milliseconds is None or not isinstance(error.__cause__, ServerTimeout):
                raise
            return False
        return True

    def _wait_session(self, connection: DatabaseWrapper, milliseconds: int | None) -> None:
        statement = statements.wait_session(self._key, shared=self._options.shared, milliseconds=milliseconds)
        try:
            if connection.in_atomic_block:
                # Only TestCase's own transaction comes here; a timeout must not abort it.
                with transaction.atomic(using=self.using):
                    _execute(connection, statement)
            else:
                _execute(connection, statement)
        except BaseException:
            self._free_if_granted(connection)
            raise

    def _wait_transaction(self, connection: DatabaseWrapper, milliseconds: int | None) -> None:
        statement = statements.wait_transaction(self._key, shared=self._options.shared, milliseconds=milliseconds)
        try:
            _execute(connection, statement)
        except DatabaseFailure as error:
            if milliseconds is not None and isinstance(error.__cause__, ServerTimeout):
                _execute(connection, statements.BACK_TO_SAVEPOINT)
            raise

    def _free_if_granted(self, connection: DatabaseWrapper) -> None:
        try:
            _execute(connection, statements.free_if_granted(self._key, shared=self._options.shared))
        except DatabaseFailure:
            # What cannot be asked must not keep a lock: without its session no lock remains.
            connection.close()

    def _say_busy(self) -> None:
        timeout = self._options.timeout
        waited = "" if not timeout else f" for {timeout:g} s"
        error = LockNotAvailable(
            f"Lock {self.name!r} is held by somebody else and was not to be had{waited}.",
            name=self.name,
            key=self.key,
            timeout=timeout,
        )
        logger.info("%s", error)
        signals.lock_busy.send_robust(type(self), handle=self, waited=self.waited)
        self._leave_transaction(error)
        raise error

    def _note_held(self, connection: DatabaseWrapper) -> None:
        self._is_held = True
        self._since = time.monotonic()
        self._session = connection.connection
        held_by(connection).append(self)
        logger.debug("Took lock %r after %.3f s.", self.name, self.waited)
        signals.lock_acquired.send_robust(type(self), handle=self)

    # Holding it

    @property
    def held_for(self) -> float:
        """Seconds since it was taken."""
        return time.monotonic() - self._since

    def assert_held(self) -> None:
        """Raise ``LockLost`` if the lock was given back or its session is gone. Asks the server nothing."""
        connection: Any = connections[self.using]
        if not self._is_held or connection.connection is not self._session or has_hung_up(connection):
            raise self._lost("its session is gone")

    # Giving it back

    def release(self, error: BaseException | None = None) -> None:
        """Give the lock back. A transaction lock stays until the end of its transaction.

        ``error`` is what the body raised, if it did: a lost lock is then logged instead of raised, so that the first
        cause stays visible. Raises ``LockLost``, and ``LockError`` in another thread or when it is not held.
        """
        if threading.get_ident() != self._thread:
            raise LockError(f"Lock {self.name!r} belongs to another thread.", name=self.name, key=self.key)
        if not self._is_held:
            raise LockError(f"Lock {self.name!r} is not held.", name=self.name, key=self.key)
        self._is_held = False
        connection = connection_for(self.using)
        with suppress(ValueError):
            held_by(connection).remove(self)
        if self.scope == "session":
            self._free(connection, error)
        self._leave_transaction(error)
        logger.debug("Gave back lock %r after %.3f s.", self.name, self.held_for)
        signals.lock_released.send_robust(type(self), handle=self, held=self.held_for)

    def _free(self, connection: DatabaseWrapper, error: BaseException | None) -> None:
        reason = self._try_to_free(connection)
        if reason is None:
            return
        signals.lock_lost.send_robust(type(self), handle=self, held=self.held_for)
        lost = self._lost(reason)
        if error is None:
            raise lost
        logger.error("%s", lost)

    def _try_to_free(self, connection: DatabaseWrapper) -> str | None:
        """Free the session lock; return why that was not possible, or None."""
        if connection.connection is not self._session or self._session is None:
            return "its connection was closed meanwhile"
        try:
            was_held = _fetch(connection, statements.free_session(self._key, shared=self._options.shared))
        except DatabaseFailure as error:
            connection.close()
            return f"its session has ended ({str(error).strip().splitlines()[0]})"
        return None if was_held else "PostgreSQL says that this session did not hold it"

    def _lost(self, reason: str) -> LockLost:
        return LockLost(
            f"Lock {self.name!r} was lost before it was given back: {reason}. Others may have held it meanwhile.",
            name=self.name,
            key=self.key,
        )

    def _leave_transaction(self, error: BaseException | None) -> None:
        own, self._own_transaction = self._own_transaction, None
        if own is not None:
            own.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def held_by(connection: DatabaseWrapper) -> list[Handle]:
    """Return the handles that this thread has taken on its connection and not given back, the oldest first."""
    held: list[Handle] = connection.__dict__.setdefault("_pglock_held", [])
    return held


def _execute(connection: DatabaseWrapper, statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)


def _fetch(connection: DatabaseWrapper, statement: str) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone()[0]
