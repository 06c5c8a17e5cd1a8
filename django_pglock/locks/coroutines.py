"""Locks of coroutines, in a session separate from Django's. The event loop does not wait for the database.

All coroutines of an event loop share one session, which is one holder for PostgreSQL. So they first exclude each other
here, in the process: they queue for each number, and a lock that is released goes to the next one at once. Only the
first of a queue asks the server. It never waits there, because all other coroutines would wait as well: it polls, if
another session holds the lock. After half a second, a few coroutines get sessions of their own to wait in the server's
queue. All that coroutines ask at the same moment is one message. PostgreSQL cannot see the queues, so a circle of
coroutines that wait for each other is found here.

A lock of scope "transaction", for poolers, or with ``max_hold``, has a session of its own in any case.
In each scope a lock is independent of Django's connection and of an ``atomic()`` block around it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from django.db import Error as DatabaseFailure
from django.db import OperationalError
from psycopg.errors import DeadlockDetected

from django_pglock.conf import get_settings
from django_pglock.errors import LockError
from django_pglock.locks import statements as sql
from django_pglock.locks.handle import NOT_HELD_BY_SESSION, BaseHandle, first_line
from django_pglock.locks.request import Request
from django_pglock.locks.session_locks import LockRecord, RecordState, session_locks_of
from django_pglock.locks.statements import Busy
from django_pglock.postgres.sessions import AsyncSession, open_session, refuse_greenlets

#: Seconds between polls for a lock that another session holds: the first pause, and the longest one.
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.25
#: The number of questions in one message. A SELECT has at most 1,664 columns.
MOST_QUESTIONS = 500
#: How many sessions of single coroutines an event loop keeps for the next ones, and opens for those that wait for long.
MOST_IDLE = 3
#: Seconds for which a lock waits for one more session, if the loop has one. A pooler may have none left for the loop.
OPEN_WITHIN = 10.0


class Turn:
    """The place of one coroutine in the queues of its numbers."""

    def __init__(self, owner: ref[asyncio.Task[Any]], *, shared: bool, needs_session: bool) -> None:
        # Not the asyncio task itself, because the result of the task may be a handle, which would then be a circle of
        # references.
        self.owner = owner
        self.shared = shared
        #: Whether it needs a session of its own.
        self.needs_session = needs_session
        #: The numbers that it has here, or waits for.
        self.numbers: list[int] = []
        #: The session in which it has them on the server.
        self.session: LockSession | None = None
        #: The number that it waits for, and the future that is done when it has it.
        self.waits_for: int | None = None
        self.is_next: asyncio.Future[None] | None = None


class Queue:
    """The coroutines that have one number, and those that wait for it in the order of their arrival."""

    def __init__(self) -> None:
        self.holders: list[Turn] = []
        self.waiters: deque[Turn] = deque()

    def allows(self, turn: Turn) -> bool:
        """Return whether no other coroutine has the number in a conflicting mode."""
        return all(each.owner is turn.owner or (each.shared and turn.shared) for each in self.holders)

    def is_free_for(self, turn: Turn) -> bool:
        """Return whether a coroutine needs no wait: it is the first, or has the number already."""
        has_it = any(each.owner is turn.owner for each in self.holders)
        return (has_it or not self.waiters) and self.allows(turn)

    def leave(self, turn: Turn) -> None:
        """Remove a coroutine, and give the number to the next ones."""
        for turns in (self.holders, self.waiters):
            if turn in turns:
                turns.remove(turn)
        while self.waiters and self.allows(self.waiters[0]):
            following = self.waiters.popleft()
            self.holders.append(following)
            if following.is_next is not None and not following.is_next.done():
                following.is_next.set_result(None)


class LockSession:
    """A session with locks of coroutines. ``ask`` sends what they ask at the same moment in one message."""

    def __init__(self, session: AsyncSession) -> None:
        self.session = session
        self.locks = session_locks_of(session.connection)
        #: How many locks are requested or held in it.
        self.users = 0
        #: Those of them that belong to responses, and so outlive the event loop.
        self.detached: set[Turn] = set()
        self._asked: list[tuple[str, str, asyncio.Future[Any]]] = []
        self._speaking: asyncio.Task[None] | None = None

    def ask(self, statement: str, names: str = "") -> asyncio.Future[Any]:
        """Send a SELECT of one value soon, and return the future of its value. A cancel does not concern others."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked.append((names, statement, answer))
        if self._speaking is None or self._speaking.done():
            self._speaking = asyncio.ensure_future(self._speak())
        return answer

    async def _speak(self) -> None:
        while self._asked:
            asked, self._asked = self._asked[:MOST_QUESTIONS], self._asked[MOST_QUESTIONS:]
            names = "".join([name for name, _, _ in asked if name][: sql.MOST_NAMES])
            try:
                # The columns are computed from left to right: a lock is freed before the next coroutine asks for it.
                row = await self.session.send(f"{names}SELECT {', '.join([f'({each})' for _, each, _ in asked])}")
                for (_, _, answer), value in zip(asked, row or (), strict=True):
                    answer.set_result(value)
            except BaseException as error:
                # It is not known what the session holds. After the end of the session nothing is held.
                self.session.end()
                _fail([answer for _, _, answer in (*asked, *self._asked) if not answer.done()], error)
                self._asked.clear()
                if not isinstance(error, Exception):
                    self._speaking = None
                    raise
        # A task refers to its loop. So the loop could not be collected while the task is stored here.
        self._speaking = None


def _fail(answers: list[asyncio.Future[Any]], error: BaseException) -> None:
    for answer in answers:
        if isinstance(error, Exception):
            answer.set_exception(error)
            answer.exception()  # otherwise asyncio would log that no coroutine has read it
        else:
            answer.cancel()


def _end_unused(opening: asyncio.Future[AsyncSession]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().end()


class LockSessions:
    """The sessions and queues for locks of one event loop on one database alias."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._queues: dict[int, Queue] = {}
        #: The turns of each coroutine.
        self._turns: dict[ref[asyncio.Task[Any]], list[Turn]] = {}
        self._open: set[LockSession] = set()
        #: The session that coroutines share.
        self.shared: LockSession | None = None
        self._idle: list[LockSession] = []
        self._openings = 0
        self._opening = asyncio.Lock()
        #: Done when a coroutine gives a number back; None if no coroutine waits for that.
        self._change: asyncio.Future[None] | None = None
        self._end = self._close_at_the_end()
        self._is_watching = False

    # Queues

    def new_turn(self, *, shared: bool, needs_session: bool) -> Turn:
        """Return a turn of this coroutine, which has no numbers yet."""
        task = asyncio.current_task()
        if task is None:
            raise LockError("An async lock must be acquired inside a coroutine that runs as an asyncio task.")
        turn = Turn(ref(task), shared=shared, needs_session=needs_session)
        self._turns.setdefault(turn.owner, []).append(turn)
        return turn

    def turns_with(self, turn: Turn, numbers: tuple[int, ...]) -> list[Turn]:
        """Return the other turns of the same coroutine that have one of these numbers."""
        return [each for each in self._turns[turn.owner] if not set(numbers).isdisjoint(each.numbers)]

    def numbers_of(self, turn: Turn) -> frozenset[int]:
        """Return the numbers that the coroutine of a turn has."""
        return frozenset([number for each in self._turns[turn.owner] for number in each.numbers])

    def held(self, numbers: tuple[int, ...]) -> frozenset[int]:
        """Return those numbers that coroutines have."""
        return frozenset([number for number in numbers if number in self._queues and self._queues[number].holders])

    def are_with_others(self, turn: Turn) -> bool:
        """Return whether other coroutines have one of the numbers of a turn, in the shared mode."""
        return any(each.owner is not turn.owner for number in turn.numbers for each in self._queues[number].holders)

    async def take(self, turn: Turn, number: int, timeout: float | None) -> None:
        """Wait until no other coroutine has a number. Raises ``Busy`` after ``timeout`` seconds."""
        queue = self._queues.setdefault(number, Queue())
        turn.numbers.append(number)
        if queue.is_free_for(turn):
            queue.holders.append(turn)
            return
        if timeout is not None and timeout <= 0:
            raise Busy
        self._refuse_circle(turn, queue)
        turn.waits_for, turn.is_next = number, asyncio.get_running_loop().create_future()
        queue.waiters.append(turn)
        await asyncio.wait([turn.is_next], timeout=timeout)
        turn.waits_for = None
        if not turn.is_next.done():
            raise Busy

    def have(self, turn: Turn, number: int) -> None:
        """Note that a coroutine has a number, that of a slot, which it did not have to queue for."""
        self._queues.setdefault(number, Queue()).holders.append(turn)
        turn.numbers.append(number)

    def leave(self, turn: Turn, number: int | None = None) -> None:
        """Give the numbers of a turn to the next coroutines: all of them, or one."""
        for each in list(turn.numbers) if number is None else [number]:
            turn.numbers.remove(each)
            queue = self._queues[each]
            queue.leave(turn)
            if not queue.holders and not queue.waiters:
                del self._queues[each]
        if number is None:
            turns = self._turns.get(turn.owner, [])
            if turn in turns:
                turns.remove(turn)
            if not turns:
                self._turns.pop(turn.owner, None)
            self._give_back(turn)
        change, self._change = self._change, None
        if change is not None:
            change.set_result(None)

    def _refuse_circle(self, turn: Turn, queue: Queue) -> None:
        """Raise the error of a deadlock if one of those that this coroutine will wait for waits for this coroutine."""
        found, seen = [queue], set()
        # A coroutine without another lock holds up nobody.
        while found and len(self._turns[turn.owner]) + len(turn.numbers) > 2:
            queue = found.pop()
            for each in {each.owner for each in (*queue.holders, *queue.waiters)} - {turn.owner}:
                for other in self._turns[each]:
                    further = self._queues.get(other.waits_for) if other.waits_for is not None else None
                    if further is None or id(further) in seen:
                        continue
                    if any(holder.owner is turn.owner for holder in further.holders):
                        text = "deadlock detected: coroutines of this event loop wait for each other's locks"
                        raise OperationalError(text) from DeadlockDetected(text)
                    seen.add(id(further))
                    found.append(further)

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until a coroutine gives a number back, up to ``seconds``."""
        if self._change is None:
            self._change = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._change], timeout=seconds)

    # Sessions

    async def shared_session(self) -> LockSession:
        """Return the session that coroutines share."""
        if self.shared is None or self.shared.session.has_ended:
            async with self._opening:
                if self.shared is None or self.shared.session.has_ended:
                    self.shared = await self.new_session()
        return self.shared

    @property
    def has_few(self) -> bool:
        """Whether a coroutine may have a session to wait in the server for a lock that could be in the shared one."""
        return len(self._open) + self._openings - len(self._idle) <= MOST_IDLE

    async def new_session(self) -> LockSession:
        """Return a session for one coroutine. Raises Django's ``OperationalError`` if the server or a pooler has none.

        A pooler lets a client wait until another one disconnects, perhaps one of this process.
        """
        while self._idle:
            session = self._idle.pop()
            if session.session.is_reusable:
                return session
            self._end_session(session)
        opening = asyncio.ensure_future(open_session(self._alias))
        self._openings += 1
        try:
            while not opening.done():
                await asyncio.wait([opening], timeout=OPEN_WITHIN)
                # Asked here, because several coroutines may begin at once, before the first session is open.
                if self._open and not opening.done():
                    raise self._no_session()  # noqa: TRY301 - the attempt has to be cancelled in any case
            session = LockSession(opening.result())
        except BaseException:
            opening.cancel()
            opening.add_done_callback(_end_unused)
            raise
        finally:
            self._openings -= 1
        self._open.add(session)
        return session

    def _no_session(self) -> OperationalError:
        return OperationalError(
            f"No session to database {self._alias!r} was free within {OPEN_WITHIN:g} s. This event loop has "
            f"{len(self._open)} sessions for locks. It needs one, and one for each lock with max_hold or of scope "
            "'transaction'. If a pooler or the role allows fewer, raise that limit."
        )

    def _give_back(self, turn: Turn) -> None:
        """Note that a session has one lock or request less. After the last one, keep it for the next coroutine.

        It ends if a coroutine waits for a new session, because a pooler may have none left.
        """
        session, turn.session = turn.session, None
        if session is None:
            return
        session.users -= 1
        if session.users == 0 and session is not self.shared:
            if session.session.is_reusable and len(self._idle) < MOST_IDLE and not self._openings:
                self._idle.append(session)
            else:
                self._end_session(session)

    def _end_session(self, session: LockSession) -> None:
        session.session.end()
        self._open.discard(session)

    async def watch_the_loop(self) -> None:
        """Ensure that all sessions are closed when the loop ends."""
        if not self._is_watching:
            self._is_watching = True
            await self._end.__anext__()

    async def _close_at_the_end(self) -> AsyncGenerator[None, None]:
        # asyncio closes the generators that are still open when a loop ends; there is no other hook.
        try:
            yield
        finally:
            while self._open:
                session = self._open.pop()
                if not session.detached:
                    session.session.end()
            # A Lock refers to its loop. So the loop could not be collected while they are stored here.
            _by_loop.pop(asyncio.get_running_loop(), None)


_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, LockSessions]] = WeakKeyDictionary()


def lock_sessions_for(alias: str) -> LockSessions:
    """Return the sessions for locks of the running event loop on a database alias.

    Raises ``ConfigurationError`` under gevent.
    """
    by_alias = _by_loop.setdefault(asyncio.get_running_loop(), {})
    if alias not in by_alias:
        refuse_greenlets("A lock of a coroutine", "Write `with lock(...)` in synchronous code, or run coroutines")
        by_alias[alias] = LockSessions(alias)
    return by_alias[alias]


class AsyncHandle(BaseHandle):
    """A lock of the coroutine that acquired it."""

    _loop: asyncio.AbstractEventLoop
    _sessions: LockSessions
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
        await sessions.watch_the_loop()
        self._loop = asyncio.get_running_loop()
        self._began = time.monotonic()
        self._turn = sessions.new_turn(shared=self.request.shared, needs_session=needs_session)
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
            await self._sessions.take(self._turn, number, self._left())
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
        turns = self._sessions.turns_with(self._turn, self.request.numbers)
        is_refused = bool(turns) and not self.request.reentrant
        is_refused |= len({turn.session for turn in turns}) > 1
        if is_refused or any(turn.needs_session != self._turn.needs_session for turn in turns):
            raise self._error(LockError, "is already held by this coroutine")
        session = turns[0].session if turns else None
        return None if session is self._sessions.shared else session

    async def _acquire_slot(self, queue: int) -> None:
        """Acquire a slot of a semaphore. Coroutines have a queue in the process, as sessions have one in the server."""
        self._refuse_held_slots(self._sessions.numbers_of(self._turn))
        await self._sessions.take(self._turn, queue, self._left())
        if self._turn.needs_session:
            request = self.request.without(self._sessions.held(self.request.numbers))
            await self._wait(await self._sessions.new_session(), request)
        else:
            while not await self._poll(self._sessions.wait_for_change):
                pass
        self._sessions.have(self._turn, self.key)
        self._sessions.leave(self._turn, queue)

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
            request, statement = request.without(self._sessions.held(request.numbers)), sql.try_slot_statement
            if not request.keys:
                return False
        session = await self._sessions.shared_session()
        record = self._new_record(session, request)
        text = statement(request)
        if self._sessions.are_with_others(self._turn):
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

        async def send(statement: str) -> sql.Row | None:
            if statement == sql.END_SESSION:
                session.session.end()
                return None
            return await session.session.send(next(begin, "") + statement)

        try:
            steps = sql.acquire(request._replace(timeout=self._left()), self.scope, inside=record is None)
            row = await sql.run_steps_async(steps, send)
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
        return self.is_open and is_held and not session.session.raw.closed

    def _lost_reason(self) -> str:
        is_held = self.is_held and (self._session is None or not self._session.session.has_ended)
        return "" if is_held else "its session has ended"

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
            if session is not self._sessions.shared:
                row = await session.session.send(
                    sql.free_statement(record.request, record.locks.limits_without(record))
                )
                record.locks.remove(record)
                return None if row and row[0] else NOT_HELD_BY_SESSION
            answer = _free_soon(session, record)
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
    """Free a lock in the session that coroutines share, in the next message."""
    answer = session.ask(sql.free_statement(record.request))
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
) -> None:
    if record is not None:
        record.locks.free_from_any_thread(record)
    session.detached.discard(turn)
    try:
        loop.call_soon_threadsafe(sessions.leave, turn)
    except RuntimeError:
        # The loop has ended. Only locks of responses have kept the session.
        if not session.detached:
            session.session.end()
