"""A lock of one coroutine, in a session outside of Django's; the event loop never waits for the database.

The lock excludes other coroutines of the same process as it does other hosts. It knows nothing of Django's connection
or of an ``atomic()`` block around it, so it is a session lock by default. Scope ``"transaction"``, for poolers, keeps a
transaction of the lock's own open while it is held.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from django.db import Error as DatabaseFailure

from django_pglock.conf import get_settings
from django_pglock.errors import LockError
from django_pglock.keys import Key
from django_pglock.locks.base_handle import BaseHandle, first_line
from django_pglock.locks.coroutine_sessions import (
    FIRST_LOOK,
    LONGEST_PAUSE,
    LockSession,
    LockSessions,
    lock_sessions_for,
)
from django_pglock.locks.options import Options, Request
from django_pglock.locks.session_locks import LockRecord, RecordState
from django_pglock.locks.statements.session_scope import acquire_session_locks, free_after_error, free_session_locks
from django_pglock.locks.statements.steps import END_SESSION, Busy, Row, Steps, run_steps_async
from django_pglock.locks.statements.transaction_scope import BEGIN, acquire_transaction_locks
from django_pglock.postgres.connections import shut


class AsyncHandle(BaseHandle):
    """A lock of the coroutine that took it."""

    _scopes_to_free = ("session", "transaction")
    _lock_sessions: LockSessions
    _lock_session: LockSession

    def __init__(self, keys: Sequence[Key], options: Options) -> None:
        super().__init__(keys, options)
        self._is_outermost = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: Any = None

    # Taking it

    async def acquire(self) -> AsyncHandle:
        """Take the lock. Raises as ``lock`` says; also when cancelled, nothing is held or awaited afterwards."""
        if self.is_disabled:
            self._acquire_disabled()
            return self
        self.scope = self._choose_scope()
        self._lock_sessions = lock_sessions_for(self.using)
        await self._lock_sessions.watch_the_loop()
        self._loop, self._owner = asyncio.get_running_loop(), self._lock_sessions.owner()
        began = time.monotonic()
        try:
            await self._acquire(began)
        except Busy as busy:
            self.waited = time.monotonic() - began
            raise self._busy_error(busy.__cause__) from busy.__cause__
        self.waited = time.monotonic() - began
        try:
            self._note_acquired()
        except BaseException:
            await self.release()
            raise
        return self

    def _choose_scope(self) -> str:
        scope = self.options.scope or get_settings().SCOPE
        return "transaction" if scope == "transaction" else "session"

    async def _acquire(self, began: float) -> None:
        """Take it in the place that the coroutine has, in one of its own, or in the shared one. Raises ``Busy``."""
        pause = FIRST_LOOK
        may_share = self.scope == "session" and self.request.max_hold is None
        # What it has in the shared session it gets again there, and nowhere else.
        must_share = self._has_it_shared(may_share=may_share)
        lock_session = None if must_share else self._lock_sessions.own_session(self.scope)
        while True:
            if lock_session is None and not must_share:
                lock_session = await self._lock_sessions.lock_session(self.scope, may_share=may_share)
            if lock_session is not None:
                return await self._acquire_in(lock_session, self._request_for(began))
            if may_share and await self._acquire_in_shared(await self._lock_sessions.shared_session()):
                return None
            left = self._left(began)
            if left is not None and left <= 0:
                raise Busy
            await self._lock_sessions.wait_for_change(pause if left is None else min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _has_it_shared(self, *, may_share: bool) -> bool:
        """Say whether the coroutine has one of these locks in the shared session.

        Raises ``LockError`` where it has one in a session that this request cannot go to: it would wait for itself.
        """
        for scope, lock_session in self._lock_sessions.sessions_with(self._owner, self.request):
            is_right = may_share if lock_session.is_shared else scope == self.scope
            if not is_right or not self.options.reentrant:
                raise LockError(f"Lock {self.name!r} is held by this coroutine already.", name=self.name, key=self.key)
            if lock_session.is_shared:
                return True
        return False

    def _left(self, began: float) -> float | None:
        timeout = self.options.timeout
        return None if timeout is None else timeout - (time.monotonic() - began)

    def _request_for(self, began: float) -> Request:
        """Return the request with the time that is left of its timeout."""
        left = self._left(began)
        if left is None or not self.request.wait or left == self.options.timeout:
            return self.request
        return self.request._replace(wait=max(1, round(left * 1000)))

    async def _acquire_in(self, lock_session: LockSession, request: Request) -> None:
        self._lock_session, self._is_outermost = lock_session, lock_session.lock_count == 1
        try:
            await self._ask(lock_session, self._new_record(lock_session, request))
        except BaseException:
            self._lock_sessions.give_back(lock_session)
            raise

    async def _acquire_in_shared(self, lock_session: LockSession) -> bool:
        """Take it where nobody waits in the server; say whether it was to be had."""
        request = self.request._replace(wait=0)
        if not self._may_ask(lock_session, request):
            return False
        self._lock_session, self._is_outermost = lock_session, False
        # A statement that is cut short here would leave it open what the session holds, and others' locks with it.
        asking = asyncio.ensure_future(self._ask(lock_session, self._new_record(lock_session, request)))
        try:
            await asyncio.shield(asking)
        except Busy:
            return False
        except asyncio.CancelledError:
            asking.add_done_callback(self._drop_what_came)
            raise
        return True

    def _drop_what_came(self, asking: asyncio.Future[None]) -> None:
        if not asking.cancelled() and asking.exception() is None:
            self.free_from_any_thread()

    def _may_ask(self, lock_session: LockSession, request: Request) -> bool:
        """Say whether no other coroutine that shares the session has the lock; PostgreSQL could not tell."""
        return lock_session.allows(request, self._owner)

    def _new_record(self, lock_session: LockSession, request: Request) -> LockRecord:
        """Let the session know what is about to be asked for, before another coroutine comes in between."""
        asked = self._build_request(lambda: lock_session.locks.numbers(lock_session.session.connection))
        asked = asked._replace(wait=request.wait)
        record = LockRecord(lock_session.locks, asked, self.scope, lock_session.session.raw, self._owner)
        self._record = record
        lock_session.locks.add(record, lock_session.session.connection)
        return record

    async def _ask(self, lock_session: LockSession, record: LockRecord) -> None:
        """Ask for it in a place. Raises ``Busy``; nothing is held after any error."""
        ask = self._ask_in_transaction if self.scope == "transaction" else self._ask_in_session
        try:
            row = await ask(lock_session, record)
        except Busy:
            lock_session.locks.remove(record)
            raise
        except BaseException:
            await self._free_after_error(lock_session, record)
            raise
        self._note_granted(record, row or ())
        record.state = RecordState.HELD

    async def _ask_in_session(self, lock_session: LockSession, record: LockRecord) -> Row | None:
        return await run_steps_async(self._steps(record), partial(self._send, lock_session, record))

    async def _ask_in_transaction(self, lock_session: LockSession, record: LockRecord) -> Row | None:
        """Ask in the session's transaction, which the first lock begins in the same message."""
        begin = iter([BEGIN] if self._is_outermost else [])

        async def send(statement: str) -> Row | None:
            return await self._send(lock_session, record, next(begin, "") + statement)

        try:
            return await run_steps_async(self._steps(record), send)
        except Busy:
            if self._is_outermost:
                await self._send(lock_session, record, "ROLLBACK")
            raise

    def _steps(self, record: LockRecord) -> Steps:
        if record.scope == "transaction":
            return acquire_transaction_locks(record.request)
        return acquire_session_locks(record.request)

    async def _free_after_error(self, lock_session: LockSession, record: LockRecord) -> None:
        """See to it that nothing remains. The end of a session's transaction, broken or not, is that of the session."""
        if self.scope == "transaction":
            lock_session.session.end()
        else:
            others = lock_session.locks.numbers(lock_session.session.connection, without=record)
            await run_steps_async(
                free_after_error(record.request, others=others), partial(self._send, lock_session, record)
            )
        lock_session.locks.remove(record)

    async def _send(self, lock_session: LockSession, record: LockRecord, statement: str) -> Row | None:
        if statement == END_SESSION:
            lock_session.session.end()
            return None
        try:
            return await lock_session.session.send(lock_session.locks.comment(without=record) + statement)
        finally:
            if lock_session.locks.pending:
                lock_session.locks.free_pending()

    # Holding it

    @property
    def is_held(self) -> bool:
        record = self._record
        if record is None:
            return self.is_open
        return self.is_open and record.state is RecordState.HELD and not record.raw.closed

    def _lost_reason(self) -> str:
        return "" if self.is_held and not self._lock_session.session.has_ended else "its session is gone"

    # Giving it back

    async def release(self, error: BaseException | None = None) -> None:
        """Give the lock back, from whichever coroutine; ``error`` is what the body raised, and is kept if it was lost.

        Raises ``LockLost``, and ``LockError`` when it is not held.
        """
        if not self.is_open:
            raise LockError(f"Lock {self.name!r} is not held.", name=self.name, key=self.key)
        self.is_open = False
        if self._record is not None and self._lock_session.is_shared:
            await asyncio.shield(asyncio.ensure_future(self._release(self._record, error)))
        elif self._record is not None:
            await self._release(self._record, error)
        self._note_released()

    async def _release(self, record: LockRecord, error: BaseException | None) -> None:
        lock_session = self._lock_session
        if lock_session.session.is_busy and not lock_session.is_shared:
            # The coroutine that has the session waits there for another lock. Right after that, this one is freed.
            self.free_from_any_thread()
            return
        try:
            reason = await self._free(lock_session, record)
        except BaseException:
            await self._free_after_error(lock_session, record)
            raise
        finally:
            lock_session.locks.remove(record)
            self._lock_sessions.give_back(lock_session)
        if reason is not None:
            self._report_lost(reason, error)

    async def _free(self, lock_session: LockSession, record: LockRecord) -> str | None:
        """Free the lock; return why that was not possible, or None."""
        if record.state is RecordState.ENDED or lock_session.session.has_ended:
            return self._reason or "its session is gone"
        try:
            if self.scope == "session":
                row = await self._send(
                    lock_session, record, free_session_locks(record.request, record.locks.limits_without(record))
                )
                return None if row and row[0] else "PostgreSQL says that this session did not hold it"
            if lock_session.lock_count == 1:
                await self._send(lock_session, record, "COMMIT")
        except DatabaseFailure as error:
            lock_session.session.end()
            return f"its session has ended ({first_line(error)})"
        return None

    # For a response, which others close

    def detach(self) -> None:
        """Let the lock outlive the event loop and the coroutine that took it."""
        if self._record is not None and not self._lock_session.is_shared:
            self._lock_sessions.detach(self._lock_session.session)

    def free_from_any_thread(self) -> None:
        record, self.is_open = self._record, False
        if record is None or record.state is RecordState.ENDED:
            return
        if self.scope == "session":
            record.locks.free_from_any_thread(record)
        else:
            shut(record.raw)
            record.state = RecordState.ENDED
        self._leave_from_elsewhere()

    def _leave_from_elsewhere(self) -> None:
        """Say in the loop that the place is free, if there is a loop yet; else the session has no use any more."""
        loop = self._loop
        try:
            if loop is None:
                return
            loop.call_soon_threadsafe(self._lock_sessions.give_back, self._lock_session)
        except RuntimeError:
            if not self._lock_session.is_shared:
                self._lock_session.session.end()
