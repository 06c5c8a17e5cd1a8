"""Locks of coroutines, in a session separate from Django's. The event loop does not wait for the database.

Coroutines first exclude each other in the process (``coroutine_queues``). Only the first of a queue asks the server, in
the session that all share (``coroutine_sessions``): it polls, if another session holds the lock. After half a second, a
few coroutines get sessions of their own to wait in the server's queue.

A lock of scope "transaction", for poolers, or with ``max_hold``, has a session of its own in any case.
In each scope a lock is independent of Django's connection and of an ``atomic()`` block around it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from django.db import Error as DatabaseFailure
from django.db import OperationalError

from django_pglock.conf import get_settings
from django_pglock.errors import LockError
from django_pglock.locks import statements as sql
from django_pglock.locks.base_handle import NOT_HELD_BY_SESSION, BaseHandle, first_line
from django_pglock.locks.coroutine_queues import Queues, Turn
from django_pglock.locks.coroutine_sessions import LockSession, LockSessions, lock_sessions_for
from django_pglock.locks.request import Request
from django_pglock.locks.session_locks import LockRecord, RecordState
from django_pglock.locks.statements import Busy

#: Seconds between polls for a lock that another session holds: the first pause, and the longest one.
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.25


class AsyncHandle(BaseHandle):
    """A lock of the coroutine that acquired it."""

    _loop: asyncio.AbstractEventLoop
    _sessions: LockSessions
    _queues: Queues
    _turn: Turn
    #: The session in which the lock is requested or held; None as long as the coroutine waits in the process.
    _session: LockSession | None = None
    _began = 0.0

    # Acquire

    async def acquire(self) -> AsyncHandle:
        """Acquire the lock. Raises as ``lock`` does. After an error or a cancel, it is neither held nor requested."""
        if self.is_disabled:
            self._acquire_disabled()
            return self
        scope = self.request.scope or get_settings().SCOPE
        self.scope = "transaction" if scope == "transaction" else "session"
        needs_session = self.scope == "transaction" or self.request.max_hold is not None
        sessions = self._sessions = lock_sessions_for(self.using)
        self._queues = sessions.queues
        await sessions.watch_the_loop()
        self._loop = asyncio.get_running_loop()
        self._began = time.monotonic()
        self._turn = self._queues.new_turn(shared=self.request.shared, needs_session=needs_session)
        try:
            await (self._acquire() if self.request.queue is None else self._acquire_slot(self.request.queue.number))
            self.waited = time.monotonic() - self._began
            self._announce_acquired()
        except Busy as busy:
            self.waited = time.monotonic() - self._began
            sessions.leave(self._turn)
            raise self._busy_error(busy.__cause__) from busy.__cause__
        except BaseException:
            self.free_from_any_thread()
            sessions.leave(self._turn)
            raise
        return self

    async def _acquire(self) -> None:
        session = self._session_with_it()
        for number in self.request.numbers:
            await self._queues.take(self._turn, number, self._left())
        if session is None and not self._turn.needs_session:
            session = await self._poll_for_long()
        elif session is None:
            session = await self._sessions.new_session()
        if session is not None:
            await self._wait(session, self.request)

    def _session_with_it(self) -> LockSession | None:
        """Return the session in which this coroutine has one of the locks already.

        Raises ``LockError`` if this request cannot use that session: the coroutine would wait for itself.
        """
        turns = self._queues.turns_with(self._turn, self.request.numbers)
        is_refused = bool(turns) and not self.request.reentrant
        is_refused |= len({turn.session for turn in turns}) > 1
        if is_refused or any(turn.needs_session != self._turn.needs_session for turn in turns):
            raise self._error(LockError, "is already held by this coroutine")
        session = turns[0].session if turns else None
        return None if session is self._sessions.shared else session

    async def _acquire_slot(self, queue: int) -> None:
        """Acquire a slot of a semaphore. Coroutines have a queue in the process, as sessions have one in the server."""
        self._refuse_held_slots(self._queues.numbers_of(self._turn))
        await self._queues.take(self._turn, queue, self._left())
        if self._turn.needs_session:
            request = self.request.without(self._queues.held(self.request.numbers))
            await self._wait(await self._sessions.new_session(), request)
        else:
            while not await self._poll(self._queues.wait_for_change):
                pass
        self._queues.have(self._turn, self.key)
        self._queues.leave(self._turn, queue)

    def _left(self) -> float | None:
        timeout = self.request.timeout
        return None if timeout is None else max(0.0, timeout - (time.monotonic() - self._began))

    # In the session that coroutines share

    async def _poll_for_long(self) -> LockSession | None:
        """Ask for the lock until it is granted. If that takes long, return a session in which to wait in the server.

        There, sessions that wait get the lock in the order of their arrival, and none that polls gets it before them.
        """
        while not await self._poll(asyncio.sleep):
            if self._sessions.has_few:
                with suppress(OperationalError):
                    return await self._sessions.new_session()
        return None

    async def _poll(self, wait: Callable[[float], Awaitable[object]]) -> bool:
        """Ask for the lock for half a second. Return whether it was granted. Raises ``Busy`` at the timeout.

        ``wait`` waits for up to a number of seconds.
        """
        pause = FIRST_PAUSE
        while not await self._try():
            left = self._left()
            if left is not None and left <= 0:
                raise Busy
            if pause > LONGEST_PAUSE:
                return False
            await wait(pause if left is None else min(pause, left))
            pause *= 2
        return True

    async def _try(self) -> bool:
        """Ask for the lock once, without a wait in the server. Return whether it was granted."""
        request, statement = self.request, sql.try_statement
        if request.queue is not None:
            # PostgreSQL would grant the session a slot that it holds already.
            request, statement = request.without(self._queues.held(request.numbers)), sql.try_slot_statement
            if not request.keys:
                return False
        session = await self._sessions.shared_session()
        record = self._new_record(session, request)
        text = statement(request)
        if self._queues.are_with_others(self._turn):
            text = sql.unless_awaited(request, text)
        answer = session.ask(text, sql.comment(request.keys))
        try:
            value = await asyncio.shield(answer)
        except BaseException:
            answer.add_done_callback(partial(_free_unused, session, record))
            raise
        if not value:
            session.locks.remove(record)
            return False
        self._use(session)
        self._have(session, record, [value])
        return True

    # In a session of its own

    async def _wait(self, session: LockSession, request: Request) -> None:
        """Wait for the lock in the server. Raises ``Busy``. After any other error, the session has ended."""
        record = None if self.scope == "transaction" else self._new_record(session, request)
        self._use(session)
        begin = iter([sql.BEGIN] if record is None and session.users == 1 else [])

        def send(statement: str) -> Awaitable[sql.Row | None]:
            return session.session.send(next(begin, "") + statement)

        try:
            steps = sql.acquire(request._replace(timeout=self._left()), self.scope, inside=record is None)
            row = await sql.run_steps_async(steps, send, session.session.end)
        except Busy:
            if record is not None:
                session.locks.remove(record)
            elif session.users == 1:
                await session.session.send("ROLLBACK")
            raise
        except BaseException:
            session.session.end()
            raise
        self._have(session, record, row or ())

    # Hold

    def _new_record(self, session: LockSession, request: Request) -> LockRecord:
        """Add a record of a session lock to the session, before it is requested."""
        record = LockRecord(session.locks, request, session.session.raw)
        session.locks.add(record)
        return record

    def _use(self, session: LockSession) -> None:
        """Note that this lock is requested or held in a session."""
        self._turn.session = session
        session.users += 1

    def _have(self, session: LockSession, record: LockRecord | None, row: Sequence[Any]) -> None:
        """Note that the lock was granted."""
        self._session, self._record = session, record
        self._note_granted(row)
        if record is not None:
            record.state = RecordState.HELD
        self._free_if_dropped(partial(_free_from_any_thread, record, session, self._sessions, self._turn, self._loop))

    @property
    def is_held(self) -> bool:
        session, record = self._session, self._record
        if session is None:
            return self.is_open
        is_held = record is None or record.state is RecordState.HELD
        return self.is_open and is_held and not session.session.has_ended

    # Release

    async def release(self, error: BaseException | None = None) -> None:
        """Release the lock, in any coroutine.

        ``error`` is the exception of the body, if there is one. Then a lost lock is logged instead of raised. Raises
        ``LockLost``, and ``LockError`` if the lock is not held.
        """
        if not self.is_open:
            raise self._error(LockError, "is not held")
        self.is_open = False
        reason = None
        if self._session is not None:
            try:
                reason = await self._free(self._session, self._record)
            finally:
                self._sessions.leave(self._turn)
                self._stop_watch()
        if reason is not None:
            self._report_lost(reason, error)
        self._announce_released()

    async def _free(self, session: LockSession, record: LockRecord | None) -> str | None:
        """Free the lock. Return why that was not possible, or None."""
        if session.session.has_ended or (record is not None and record.state is RecordState.ENDED):
            return self._reason or "its session has ended"
        try:
            if record is None:
                if session.users == 1:
                    await session.session.send("COMMIT")
                return None
            answer = _free_soon(session, record)
            if session is self._sessions.shared:
                # Already now, so that the question of the next coroutine is in the same message.
                self._sessions.leave(self._turn)
            return None if await asyncio.shield(answer) else NOT_HELD_BY_SESSION
        except DatabaseFailure as error:
            session.session.end()
            return f"its session has ended ({first_line(error)})"
        except BaseException:
            if session is not self._sessions.shared:
                session.session.end()
            raise

    # For a response, which other code closes

    def detach(self) -> None:
        """Keep the lock after the end of the event loop and of the coroutine that acquired it."""
        if self._session is not None:
            self._session.detached.add(self._turn)

    def free_from_any_thread(self) -> None:
        self.is_open = False
        if self._session is not None:
            _free_from_any_thread(self._record, self._session, self._sessions, self._turn, self._loop)
        self._stop_watch()


def _free_soon(session: LockSession, record: LockRecord) -> asyncio.Future[Any]:
    """Free a lock in the next message of its session."""
    answer = session.ask(sql.free_statement(record.request, record.locks.limits_without(record)))
    answer.add_done_callback(lambda answer: record.locks.remove(record))
    return answer


def _free_unused(session: LockSession, record: LockRecord, answer: asyncio.Future[Any]) -> None:
    """Free a lock that was granted to a coroutine after its cancel."""
    if answer.cancelled() or answer.exception() is not None or not answer.result():
        record.locks.remove(record)
        return
    if record.request.queue is not None:
        record.request = record.request.only(answer.result())
    _free_soon(session, record)


def _free_from_any_thread(
    record: LockRecord | None,
    session: LockSession,
    sessions: LockSessions,
    turn: Turn,
    loop: asyncio.AbstractEventLoop,
) -> bool:
    was_held = record is None or record.locks.free_from_any_thread(record)
    session.detached.discard(turn)
    try:
        loop.call_soon_threadsafe(sessions.leave, turn)
    except RuntimeError:
        # The loop has ended. Only locks of responses have kept the session.
        if not session.detached:
            session.session.end()
    return was_held
