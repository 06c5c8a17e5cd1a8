"""The sessions of an event loop with the locks of its coroutines.

Nearly all locks are in one session, which coroutines share. A statement there never waits for a lock, because all other
coroutines would wait as well. All that coroutines ask at the same moment is one message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any
from weakref import WeakKeyDictionary

from django.db import OperationalError

from django_pglock.locks.coroutine_queues import Queues, Turn
from django_pglock.locks.session_locks import session_locks_of
from django_pglock.locks.statements import MOST_NAMES
from django_pglock.postgres.sessions import AsyncSession, open_session, refuse_greenlets

#: The number of questions in one message. A SELECT has at most 1,664 columns.
MOST_QUESTIONS = 500
#: How many sessions of single coroutines an event loop keeps for the next ones, and opens for those that wait for long.
MOST_IDLE = 3
#: Seconds for which a lock waits for one more session, if the loop has one. A pooler may have none left for the loop.
OPEN_WITHIN = 10.0


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
            names = "".join([name for name, _, _ in asked if name][:MOST_NAMES])
            try:
                # The columns are computed from left to right: a lock is freed before the next coroutine asks for it.
                row = await self.session.send(f"{names}SELECT {', '.join([f'({each})' for _, each, _ in asked])}")
                for (_, _, answer), value in zip(asked, row or (), strict=True):
                    answer.set_result(value)
            except BaseException as error:  # noqa: BLE001 - each coroutine that asks gets it
                # It is not known what the session holds. After the end of the session nothing is held.
                self.session.end()
                for _, _, answer in (*asked, *self._asked):
                    if not answer.done():
                        answer.set_exception(error)
                        answer.exception()  # otherwise asyncio would log that no coroutine has read it
                self._asked.clear()
        # A task refers to its loop. So the loop could not be collected while the task is stored here.
        self._speaking = None


def _end_unused(opening: asyncio.Future[AsyncSession]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().end()


class LockSessions:
    """The sessions and queues for locks of one event loop on one database alias."""

    def __init__(self, alias: str) -> None:
        self.queues = Queues()
        self._alias = alias
        self._open: set[LockSession] = set()
        #: The session that coroutines share.
        self.shared: LockSession | None = None
        self._idle: list[LockSession] = []
        self._openings = 0
        self._opening = asyncio.Lock()
        #: Ends with the loop; None until a coroutine acquires a lock.
        self._end: AsyncGenerator[None, None] | None = None

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

    def leave(self, turn: Turn) -> None:
        """Note that a lock is over. Its session is kept for the next coroutine, if it has no other lock.

        The session ends if a coroutine waits for a new one, because a pooler may have none left.
        """
        self.queues.leave(turn)
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
        if self._end is None:
            self._end = self._close_at_the_end()
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
