"""A lock of one coroutine, in a session separate from Django's. The event loop does not wait for the database.

The lock excludes other coroutines of the same process, and other hosts. It is independent of Django's connection and of
an ``atomic()`` block around it, so it is a session lock by default. With scope ``"transaction"``, for poolers, the lock
has its own transaction, which is open while the lock is held.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

from django.db import Error as DatabaseFailure

from django_pglock.conf import get_settings
from django_pglock.errors import LockError
from django_pglock.locks.base_handle import NOT_HELD_BY_SESSION, BaseHandle, first_line
from django_pglock.locks.coroutine_sessions import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    LockSession,
    LockSessions,
    lock_sessions_for,
)
from django_pglock.locks.options import Request
from django_pglock.locks.session_locks import LockRecord, RecordState
from django_pglock.locks.statements.session_scope import acquire_session_locks, free_after_error, free_statement
from django_pglock.locks.statements.steps import Busy, Row, Steps, run_steps_async
from django_pglock.locks.statements.transaction_scope import BEGIN, acquire_transaction_locks
from django_pglock.postgres.connections import shut


class AsyncHandle(BaseHandle):
    """A lock of the coroutine that acquired it."""

    _loop: asyncio.AbstractEventLoop
    _sessions: LockSessions
    #: The session in which the lock is requested or held.
    _session: LockSession
    #: The object that represents the coroutine.
    _owner: Any
    #: Whether the lock is the first in its session. Then it begins the session's transaction, with scope
    #: ``"transaction"``. The last lock that is released ends the transaction.
    _is_outermost = False

    # Acquire

    async def acquire(self) -> AsyncHandle:
        """Acquire the lock. Raises as ``lock`` does. After an error or a cancel, it is neither held nor requested."""
        if self.is_disabled:
            self._acquire_disabled()
            return self
        scope = self.options.scope or get_settings().SCOPE
        self.scope = "transaction" if scope == "transaction" else "session"
        self._sessions = lock_sessions_for(self.using)
        await self._sessions.watch_the_loop()
        self._loop, self._owner = asyncio.get_running_loop(), self._sessions.owner()
        began = time.monotonic()
        try:
            await self._acquire(began)
        except Busy as busy:
            self.waited = time.monotonic() - began
            raise self._busy_error(busy.__cause__) from busy.__cause__
        self.waited = time.monotonic() - began
        try:
            self._announce_acquired()
        except BaseException:
            await self.release()
            raise
        return self

    async def _acquire(self, began: float) -> None:
        """Acquire the lock in the coroutine's own session, in a new one, or in the shared one. Raises ``Busy``."""
        pause = FIRST_PAUSE
        may_share = self.scope == "session" and self.request.max_hold is None
        # If the coroutine has the lock in the shared session, only that session can get it again.
        must_share = self._has_it_shared(may_share=may_share)
        session = None if must_share else self._sessions.own_session(self.scope)
        while True:
            if session is None and not must_share:
                session = await self._sessions.new_session(self.scope, may_share=may_share)
            if session is not None:
                return await self._acquire_in(session, self._request_for(began))
            if may_share and await self._acquire_in_shared(await self._sessions.shared_session()):
                return None
            left = self._left(began)
            if left is not None and left <= 0:
                raise Busy
            await self._sessions.wait_for_change(pause if left is None else min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _has_it_shared(self, *, may_share: bool) -> bool:
        """Return whether the coroutine has one of these locks in the shared session.

        Raises ``LockError`` if it has one in a session that this request cannot use: it would wait for itself.
        """
        for scope, session in self._sessions.sessions_with(self._owner, self.request):
            is_right = may_share if session.is_shared else scope == self.scope
            if not is_right or not self.options.reentrant:
                raise self._error(LockError, "is already held by this coroutine")
            if session.is_shared:
                return True
        return False

    def _left(self, began: float) -> float | None:
        timeout = self.options.timeout
        return None if timeout is None else timeout - (time.monotonic() - began)

    def _request_for(self, began: float) -> Request:
        """Return the request with the remaining time of its timeout."""
        left = self._left(began)
        if left is None or not self.request.wait or left == self.options.timeout:
            return self.request
        return self.request._replace(wait=max(1, round(left * 1000)))

    async def _acquire_in(self, session: LockSession, request: Request) -> None:
        self._session, self._is_outermost = session, session.lock_count == 1
        try:
            await self._run(self._new_record(request))
        except BaseException:
            self._sessions.give_back(session)
            raise

    async def _acquire_in_shared(self, session: LockSession) -> bool:
        """Acquire the lock without a wait in the server. Return whether it was granted."""
        self._session, self._is_outermost = session, False
        request = self.request._replace(wait=0)
        if not self._may_request(request):
            return False
        # Shielded: after an interrupted statement it would not be known what the session holds, and it has locks of
        # other coroutines.
        running = asyncio.ensure_future(self._run(self._new_record(request)))
        try:
            await asyncio.shield(running)
        except Busy:
            return False
        except asyncio.CancelledError:
            running.add_done_callback(self._free_unused)
            raise
        return True

    def _free_unused(self, running: asyncio.Future[None]) -> None:
        if not running.cancelled() and running.exception() is None:
            self.free_from_any_thread()

    def _may_request(self, request: Request) -> bool:
        """Return whether no other coroutine of the shared session has the lock. For PostgreSQL they are one holder."""
        return self._session.allows(request, self._owner)

    def _new_record(self, request: Request) -> LockRecord:
        """Add a record of the request to the session, before another coroutine can make a request."""
        session, locks = self._session.session, self._session.locks
        asked = self._build_request(self._session.numbers)._replace(wait=request.wait)
        record = self._record = LockRecord(locks, asked, self.scope, session.raw, self._owner)
        free = partial(_free_from_any_thread, record, self._loop, self._sessions, self._session)
        self._free_if_dropped(self._warn_and_free(free))
        locks.add(record, session.connection)
        return record

    async def _run(self, record: LockRecord) -> None:
        """Send the request. Raises ``Busy``. After an error, nothing is held."""
        try:
            if self._is_outermost and self.scope == "transaction":
                row = await self._run_in_own_transaction(record)
            else:
                row = await run_steps_async(self._steps(record), partial(self._session.send, record))
        except Busy:
            record.locks.remove(record)
            self._stop_watch()
            raise
        except BaseException:
            await self._free_after_error(record)
            self._stop_watch()
            raise
        self._note_granted(record, row or ())
        record.state = RecordState.HELD

    async def _run_in_own_transaction(self, record: LockRecord) -> Row | None:
        """Run the steps in a transaction that begins in their first message."""
        begin = iter([BEGIN])

        async def send(statement: str) -> Row | None:
            return await self._session.send(record, next(begin, "") + statement)

        try:
            return await run_steps_async(self._steps(record), send)
        except Busy:
            await self._session.send(record, "ROLLBACK")
            raise

    def _steps(self, record: LockRecord) -> Steps:
        if record.scope == "transaction":
            return acquire_transaction_locks(record.request)
        return acquire_session_locks(record.request)

    async def _free_after_error(self, record: LockRecord) -> None:
        """Ensure that nothing stays held."""
        session = self._session
        if self.scope == "transaction":
            # The end of the session also ends the transaction.
            session.session.end()
        else:
            steps = free_after_error(record.request, others=session.numbers(without=record))
            await run_steps_async(steps, partial(session.send, record))
        record.locks.remove(record)

    # Hold

    @property
    def is_held(self) -> bool:
        record = self._record
        if record is None:
            return self.is_open
        return self.is_open and record.state is RecordState.HELD and not record.raw.closed

    def _lost_reason(self) -> str:
        return "" if self.is_held and not self._session.session.has_ended else "its session has ended"

    # Release

    async def release(self, error: BaseException | None = None) -> None:
        """Release the lock, in any coroutine.

        ``error`` is the exception of the body, if there is one. Then a lost lock is logged instead of raised. Raises
        ``LockLost``, and ``LockError`` if the lock is not held.
        """
        if not self.is_open:
            raise self._error(LockError, "is not held")
        self.is_open = False
        if self._record is not None and self._session.is_shared:
            await asyncio.shield(asyncio.ensure_future(self._release(self._record, error)))
        elif self._record is not None:
            await self._release(self._record, error)
        self._stop_watch()
        self._announce_released()

    async def _release(self, record: LockRecord, error: BaseException | None) -> None:
        session = self._session
        if session.session.is_busy and not session.is_shared:
            # The coroutine of this session waits in it for another lock. Right after that, this lock is freed.
            self.free_from_any_thread()
            return
        try:
            reason = await self._free(record)
        except BaseException:
            await self._free_after_error(record)
            raise
        finally:
            record.locks.remove(record)
            self._sessions.give_back(session)
        if reason is not None:
            self._report_lost(reason, error)

    async def _free(self, record: LockRecord) -> str | None:
        """Free the lock. Return why that was not possible, or None."""
        session = self._session
        if record.state is RecordState.ENDED or session.session.has_ended:
            return self._reason or "its session has ended"
        try:
            if self.scope == "session":
                limits = record.locks.limits_without(record)
                row = await session.send(record, free_statement(record.request, limits))
                return None if row and row[0] else NOT_HELD_BY_SESSION
            if session.lock_count == 1:
                await session.send(record, "COMMIT")
        except DatabaseFailure as error:
            session.session.end()
            return f"its session has ended ({first_line(error)})"
        return None

    # For a response, which other code closes

    def detach(self) -> None:
        """Keep the lock after the end of the event loop and of the coroutine that acquired it."""
        if self._record is not None and not self._session.is_shared:
            self._sessions.detach(self._session.session)

    def free_from_any_thread(self) -> None:
        self.is_open = False
        if self._record is not None:
            _free_from_any_thread(self._record, self._loop, self._sessions, self._session)
        self._stop_watch()


def _free_from_any_thread(
    record: LockRecord, loop: asyncio.AbstractEventLoop, sessions: LockSessions, session: LockSession
) -> None:
    if record.state is RecordState.ENDED:
        return
    if record.scope == "session":
        record.locks.free_from_any_thread(record)
    else:
        shut(record.raw)
        record.state = RecordState.ENDED
    try:
        loop.call_soon_threadsafe(sessions.give_back, session)
    except RuntimeError:
        # The loop has ended, so no other code will use the session.
        if not session.is_shared:
            session.session.end()
