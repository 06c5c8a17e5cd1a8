"""A lock of one thread, on its Django connection: how it is taken, noticed when lost, and given back.

What the scopes mean:

- *session*: held by the database session until it is freed. The handle remembers the session; if that is gone at the
  end, or PostgreSQL says that the lock was not held, the lock was lost and ``LockLost`` says so.
- *transaction*: held by the transaction and freed by PostgreSQL with COMMIT or ROLLBACK, never by us: whoever comes
  next sees what was committed. A rollback to a savepoint before the lock frees it, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db import Error as DatabaseFailure
from django.db import connections, transaction
from django.utils.asyncio import async_unsafe

from django_pglock.conf import get_settings
from django_pglock.db import OWN_WRAPPERS, connection_for, has_hung_up, in_atomic, send
from django_pglock.errors import LockError
from django_pglock.keys import Key
from django_pglock.locks import statements
from django_pglock.locks.conversation import HANG_UP, Conversation, Row, carry, take, take_any
from django_pglock.locks.holding import Holding, Slots, first_line
from django_pglock.locks.options import Options

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper


class Handle(Holding):
    """A lock of this thread."""

    def __init__(self, keys: Sequence[Key], options: Options) -> None:
        super().__init__(keys, options)
        self._thread = threading.get_ident()
        self._session: Any = None
        self._own_transaction: Any = None

    # Taking it

    @async_unsafe("Taking a lock stops the event loop here. Use 'async with', or await its aacquire().")
    def acquire(self, *, may_begin: bool) -> Handle:
        """Take the lock. ``may_begin``: the caller will also call ``release``, so a transaction may be opened for it.

        Raises ``LockNotAvailable`` when it is busy for longer than the timeout and ``LockScopeError`` where it would
        not protect; every other database error passes through, and nothing is held then.
        """
        if self.is_disabled:
            self._pretend()
            return self
        connection = connection_for(self.using)
        self.scope = self._choose_scope(connection, may_begin=may_begin)
        if self.scope == "transaction":
            connection.ensure_connection()
            self._refuse_stale_snapshot(connection)
        if not self.options.reentrant:
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
            busy = self._note_busy()
            self._leave_transaction(busy)
            raise busy
        self._session = connection.connection
        _register(connection, self)
        self._note_taken()
        return self

    def _choose_scope(self, connection: DatabaseWrapper, *, may_begin: bool) -> str:
        scope = self.options.scope or get_settings().SCOPE
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
        return scope

    def _refuse_stale_snapshot(self, connection: DatabaseWrapper) -> None:
        level = getattr(connection, "isolation_level", None)
        if not self.options.stale_ok and level is not None and level > 2:
            raise self._wrong_scope(
                "at REPEATABLE READ or SERIALIZABLE the snapshot is older than the lock, so you would read what was "
                "there before the last holder committed. Take it outside atomic(), or pass stale_ok=True"
            )

    def _refuse_reentry(self, connection: DatabaseWrapper) -> None:
        if not _numbers_held_by(connection).isdisjoint(self.keys):
            raise LockError(f"Lock {self.name!r} is held by this thread already.", name=self.name, key=self.key)

    def _ask(self, connection: DatabaseWrapper) -> bool:
        """Send the one statement; say whether the lock was granted."""
        row = carry(self._conversation(connection), partial(_send, connection))
        if row is not None:
            self._note_answer(row)
        return row is not None

    def _conversation(self, connection: DatabaseWrapper) -> Conversation:
        in_test = connection.in_atomic_block and self.scope == "session"
        return take(self.request, self.scope, held=_numbers_held_by(connection), in_test=in_test)

    # Holding it

    def assert_held(self) -> None:
        """Raise ``LockLost`` if the lock was given back or its session is gone. Asks the server nothing."""
        connection: Any = connections[self.using]
        if self.is_held and self.scope == "disabled":
            return
        self._refuse_if_given_back()
        if not self.is_held or connection.connection is not self._session or has_hung_up(connection):
            raise self._lost(self._reason or "its session is gone")

    # Giving it back

    def release(self, error: BaseException | None = None) -> None:
        """Give the lock back. A transaction lock stays until the end of its transaction.

        ``error`` is what the body raised, if it did: a lost lock is then logged instead of raised, so that the first
        cause stays visible. Raises ``LockLost``, and ``LockError`` in another thread or when it is not held.
        """
        if threading.get_ident() != self._thread:
            raise LockError(f"Lock {self.name!r} belongs to another thread.", name=self.name, key=self.key)
        if not self.is_held:
            raise LockError(f"Lock {self.name!r} is not held.", name=self.name, key=self.key)
        self.is_held = False
        if self.scope != "disabled":
            self._give_back(error)
        self._note_given_back()

    def _give_back(self, error: BaseException | None) -> None:
        connection = connection_for(self.using)
        _unregister(connection, self)
        reason = self._free(connection) if self.scope == "session" else None
        if reason is not None:
            self._note_lost(reason, error)
        self._leave_transaction(error)

    def _free(self, connection: DatabaseWrapper) -> str | None:
        """Free the session lock; return why that was not possible, or None."""
        if connection.connection is not self._session or self._session is None:
            return "its connection was closed meanwhile"
        try:
            row = _send(connection, statements.free_session(self.request, self._before))
        except DatabaseFailure as error:
            connection.close()
            return f"its session has ended ({first_line(error)})"
        return None if row and row[0] else "PostgreSQL says that this session did not hold it"

    def _leave_transaction(self, error: BaseException | None) -> None:
        own, self._own_transaction = self._own_transaction, None
        if own is not None:
            own.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


class SlotHandle(Slots, Handle):
    """One of several slots of a semaphore. ``key`` is the slot's once it is held."""

    def _conversation(self, connection: DatabaseWrapper) -> Conversation:
        mine = _numbers_held_by(connection)
        slots = [key for key in self.request.keys if key.number not in mine]
        if not slots:
            raise LockError(f"This thread holds all slots of {self.name!r} itself.", name=self.name, key=self.key)
        in_test = connection.in_atomic_block and self.scope == "session"
        return take_any(slots, self.request, self.scope, in_test=in_test)


def held_by(connection: DatabaseWrapper) -> list[Handle]:
    """Return the handles that this thread has taken on its connection and not given back, the oldest first."""
    held: list[Handle] = connection.__dict__.setdefault("_pglock_held", [])
    return held


def _numbers_held_by(connection: DatabaseWrapper) -> AbstractSet[int]:
    held = held_by(connection)
    return {number for handle in held for number in handle.keys} if held else frozenset()


def _register(connection: DatabaseWrapper, handle: Handle) -> None:
    held = held_by(connection)
    if not held and get_settings().LOCK_COMMENTS:
        connection.execute_wrappers.append(_name_what_is_held)
    held.append(handle)
    if connection.settings_dict["OPTIONS"].get("pool"):
        # Django's close() gives the session back to the pool, and a session lock would go with it to the next user.
        connection.close = partial(_end_session, connection)  # type: ignore[method-assign]


def _unregister(connection: DatabaseWrapper, handle: Handle) -> None:
    held = held_by(connection)
    with suppress(ValueError):
        held.remove(handle)
    if not held:
        connection.__dict__.pop("close", None)
        with suppress(ValueError):
            connection.execute_wrappers.remove(_name_what_is_held)


def _end_session(connection: DatabaseWrapper) -> None:
    """Close a pooled connection in earnest; the pool will see that and open another."""
    if connection.connection is not None:
        connection.connection.close()
    for handle in [*held_by(connection)]:
        _unregister(connection, handle)
    connection.close()


def _name_what_is_held(execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """Put the names of the locks that are held before each statement of the holder.

    pg_stat_activity shows a session's last statement, and PostgreSQL knows nothing but numbers. A comment that is
    there already stays the first one: it may be a hint for the planner.
    """
    if isinstance(sql, str) and not sql.lstrip().startswith("/*"):
        names = _names_held_by(context["connection"])
        sql = (names if params is None else names.replace("%", "%%")) + sql
    return execute(sql, params, many, context)


def _names_held_by(connection: DatabaseWrapper) -> str:
    held = held_by(connection)
    return statements.comment([key for handle in held for key in handle.request.keys]) if held else ""


OWN_WRAPPERS.append(_name_what_is_held)


def _send(connection: DatabaseWrapper, statement: str) -> Row | None:
    """Send a statement over Django's connection and return the last row of its answer, or obey ``HANG_UP``."""
    if statement == HANG_UP:
        connection.close()
        return None
    return send(connection, _names_held_by(connection) + statement)
