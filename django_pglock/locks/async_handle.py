"""A lock of one coroutine, in a database session of its own; the event loop never waits for the database.

The lock excludes other coroutines of the same process as it does other hosts. It knows nothing of Django's connection
or of an ``atomic()`` block around it, so it is a session lock by default. Scope ``"transaction"``, for poolers, keeps a
transaction of the lock's own open while it is held.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from django.db import Error as DatabaseFailure

from django_pglock.conf import get_settings
from django_pglock.errors import LockError
from django_pglock.keys import Key
from django_pglock.locks import statements
from django_pglock.locks.conversation import Conversation, Row, carry_async, take, take_any
from django_pglock.locks.holding import Holding, Slots, first_line
from django_pglock.locks.options import Options
from django_pglock.locks.sessions import AsyncSession, AsyncSessions, sessions_for


class AsyncHandle(Holding):
    """A lock of the coroutine that took it."""

    _sessions: AsyncSessions
    _session: AsyncSession

    def __init__(self, keys: Sequence[Key], options: Options) -> None:
        super().__init__(keys, options)
        self._is_outermost = False

    # Taking it

    async def acquire(self) -> AsyncHandle:
        """Take the lock. Raises as ``lock`` says; also when cancelled, nothing is held or awaited afterwards."""
        if self.is_disabled:
            self._pretend()
            return self
        self.scope = self._choose_scope()
        self._sessions = sessions_for(self.using)
        began = time.monotonic()
        self._session = await self._sessions.borrow(self.scope)
        self._is_outermost = self._session.depth == 1
        is_granted = False
        try:
            self._refuse_reentry()
            is_granted = await self._ask()
        finally:
            if not is_granted:
                self._sessions.give_back(self._session)
        self.waited = time.monotonic() - began
        if not is_granted:
            raise self._note_busy()
        self._session.held += self.request.keys
        self._note_taken()
        return self

    def _choose_scope(self) -> str:
        scope = self.options.scope or get_settings().SCOPE
        return "transaction" if scope == "transaction" else "session"

    def _refuse_reentry(self) -> None:
        if not self.options.reentrant and not self._session.numbers.isdisjoint(self.keys):
            raise LockError(f"Lock {self.name!r} is held by this coroutine already.", name=self.name, key=self.key)

    async def _ask(self) -> bool:
        ask = self._ask_in_transaction if self.scope == "transaction" else self._ask_in_session
        row = await ask()
        if row is not None:
            self._note_answer(row)
        return row is not None

    async def _ask_in_session(self) -> Row | None:
        return await carry_async(self._conversation(), self._session.send)

    async def _ask_in_transaction(self) -> Row | None:
        """Ask in the session's transaction, which the first lock begins in the same message."""
        begin = iter(["BEGIN;"] if self._is_outermost else [])

        async def send(statement: str) -> Row | None:
            return await self._session.send(next(begin, "") + statement)

        try:
            row = await carry_async(self._conversation(), send)
            if row is None and self._is_outermost:
                await self._session.send("ROLLBACK")
        except BaseException:
            # The transaction is broken, and with it the locks that it has; let nobody wait for its end.
            self._session.end()
            raise
        return row

    def _conversation(self) -> Conversation:
        return take(self.request, self.scope, held=self._session.numbers)

    # Holding it

    def assert_held(self) -> None:
        """Raise ``LockLost`` if the lock was given back or its session is gone. Asks the server nothing."""
        if self.is_held and self.scope == "disabled":
            return
        self._refuse_if_given_back()
        if not self.is_held or self._session.has_ended:
            raise self._lost(self._reason or "its session is gone")

    # Giving it back

    async def release(self, error: BaseException | None = None) -> None:
        """Give the lock back; ``error`` is what the body raised, if it did, and is kept when the lock was lost.

        Raises ``LockLost``, and ``LockError`` when it is not held.
        """
        if not self.is_held:
            raise LockError(f"Lock {self.name!r} is not held.", name=self.name, key=self.key)
        self.is_held = False
        if self.scope != "disabled":
            await self._give_back(error)
        self._note_given_back()

    async def _give_back(self, error: BaseException | None) -> None:
        for key in self.request.keys:
            self._session.held.remove(key)
        try:
            reason = await self._free()
        except BaseException:
            # Cancelled in the middle: the session's end frees it as well.
            self._session.end()
            raise
        finally:
            self._sessions.give_back(self._session)
        if reason is not None:
            self._note_lost(reason, error)

    async def _free(self) -> str | None:
        """Free the lock; return why that was not possible, or None."""
        try:
            if self.scope == "session":
                row = await self._session.send(statements.free_session(self.request, self._before))
                return None if row and row[0] else "PostgreSQL says that this session did not hold it"
            if self._session.depth == 1:
                await self._session.send("COMMIT")
        except DatabaseFailure as error:
            self._session.end()
            return f"its session has ended ({first_line(error)})"
        return None


class AsyncSlotHandle(Slots, AsyncHandle):
    """One of several slots of a semaphore. ``key`` is the slot's once it is held."""

    def _conversation(self) -> Conversation:
        slots = [key for key in self.request.keys if key.number not in self._session.numbers]
        if not slots:
            raise LockError(f"This coroutine holds all slots of {self.name!r} itself.", name=self.name, key=self.key)
        return take_any(slots, self.request, self.scope)
