"""How the coroutines of an event loop share one session for their locks.

For PostgreSQL the session is one holder. So the coroutines first exclude each other here, in the process: they queue
for each number, and a lock that is released goes to the next one at once. Only the first of a queue asks the server. It
never waits there, because all other coroutines would wait as well: it polls, if another session holds the lock. All
that coroutines ask at the same moment is one message. PostgreSQL cannot see the queues, so a circle of coroutines that
wait for each other is found here.

A lock of scope "transaction", or with ``max_hold``, needs a session of its own, and waits in the server.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any
from weakref import WeakKeyDictionary, ref

from django.db import OperationalError
from psycopg.errors import DeadlockDetected

from django_pglock.errors import LockError
from django_pglock.locks.session_locks import session_locks_of
from django_pglock.locks.statements import Busy
from django_pglock.postgres.async_sessions import AsyncSession, open_session, refuse_greenlets

#: The number of questions in one message. A SELECT has at most 1,664 columns.
MOST_QUESTIONS = 500
#: How many sessions of single coroutines an event loop keeps for the next ones.
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
            answers = [answer for _, _, answer in asked]
            names = "".join([name for name, _, _ in asked if name][:4])
            try:
                # The columns are computed from left to right: a lock is freed before the next coroutine asks for it.
                row = await self.session.send(f"{names}SELECT {', '.join([f'({each})' for _, each, _ in asked])}")
            except BaseException as error:
                # It is not known what the session holds. After the end of the session nothing is held.
                self.session.end()
                _fail([*answers, *[answer for _, _, answer in self._asked]], error)
                self._asked.clear()
                if not isinstance(error, Exception):
                    raise
            else:
                for answer, value in zip(answers, row or (), strict=True):
                    answer.set_result(value)


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
        self._shared: LockSession | None = None
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
        if self._shared is None or self._shared.session.has_ended:
            async with self._opening:
                if self._shared is None or self._shared.session.has_ended:
                    self._shared = await self.new_session()
        return self._shared

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
        if session.users == 0 and session is not self._shared:
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
