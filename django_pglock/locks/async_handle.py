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
from django_pglock.locks import statements
from django_pglock.locks.base_handle import Holding, Slots, first_line
from django_pglock.locks.conversation import HANG_UP, Busy, Conversation, Row, carry_async, clean, take, take_slot
from django_pglock.locks.coroutine_sessions import FIRST_LOOK, LONGEST_PAUSE, Place, Places, places_for
from django_pglock.locks.held_locks import Hold, State
from django_pglock.locks.options import Options, Request
from django_pglock.postgres.connections import shut


class AsyncHandle(Holding):
    """A lock of the coroutine that took it."""

    _scopes_to_free = ("session", "transaction")
    _places: Places
    _place: Place

    def __init__(self, keys: Sequence[Key], options: Options) -> None:
        super().__init__(keys, options)
        self._is_outermost = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._owner: Any = None

    # Taking it

    async def acquire(self) -> AsyncHandle:
        """Take the lock. Raises as ``lock`` says; also when cancelled, nothing is held or awaited afterwards."""
        if self.is_disabled:
            self._pretend()
            return self
        self.scope = self._choose_scope()
        self._places = places_for(self.using)
        await self._places.watch_the_loop()
        self._loop, self._owner = asyncio.get_running_loop(), self._places.owner()
        began = time.monotonic()
        try:
            await self._take(began)
        except Busy as busy:
            self.waited = time.monotonic() - began
            raise self._note_busy(busy.__cause__) from busy.__cause__
        self.waited = time.monotonic() - began
        try:
            self._note_taken()
        except BaseException:
            await self.release()
            raise
        return self

    def _choose_scope(self) -> str:
        scope = self.options.scope or get_settings().SCOPE
        return "transaction" if scope == "transaction" else "session"

    async def _take(self, began: float) -> None:
        """Take it in the place that the coroutine has, in one of its own, or in the shared one. Raises ``Busy``."""
        pause = FIRST_LOOK
        may_share = self.scope == "session" and self.request.max_hold is None
        # What it has in the shared session it gets again there, and nowhere else.
        must_share = self._has_it_shared(may_share=may_share)
        place = None if must_share else self._places.place_of(self.scope)
        while True:
            if place is None and not must_share:
                place = await self._places.place(self.scope, may_share=may_share)
            if place is not None:
                return await self._take_in(place, self._request_for(began))
            if may_share and await self._take_in_shared(await self._places.shared_place()):
                return None
            left = self._left(began)
            if left is not None and left <= 0:
                raise Busy
            await self._places.wait_for_change(pause if left is None else min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _has_it_shared(self, *, may_share: bool) -> bool:
        """Say whether the coroutine has one of these locks in the shared session.

        Raises ``LockError`` where it has one in a session that this request cannot go to: it would wait for itself.
        """
        for scope, place in self._places.with_common(self._owner, self.request):
            is_right = may_share if place.is_shared else scope == self.scope
            if not is_right or not self.options.reentrant:
                raise LockError(f"Lock {self.name!r} is held by this coroutine already.", name=self.name, key=self.key)
            if place.is_shared:
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

    async def _take_in(self, place: Place, request: Request) -> None:
        self._place, self._is_outermost = place, place.depth == 1
        try:
            await self._ask(place, self._note_asked(place, request))
        except BaseException:
            self._places.leave(place)
            raise

    async def _take_in_shared(self, place: Place) -> bool:
        """Take it where nobody waits in the server; say whether it was to be had."""
        request = self.request._replace(wait=0)
        if not self._may_ask(place, request):
            return False
        self._place, self._is_outermost = place, False
        # A statement that is cut short here would leave it open what the session holds, and others' locks with it.
        asking = asyncio.ensure_future(self._ask(place, self._note_asked(place, request)))
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
            self.free_from_elsewhere()

    def _may_ask(self, place: Place, request: Request) -> bool:
        """Say whether no other coroutine that shares the session has the lock; PostgreSQL could not tell."""
        return place.has_room_for(request, self._owner)

    def _note_asked(self, place: Place, request: Request) -> Hold:
        """Let the session know what is about to be asked for, before another coroutine comes in between."""
        asked = self._what_is_asked(lambda: place.holds.numbers(place.session.connection))
        asked = asked._replace(wait=request.wait)
        hold = Hold(place.holds, asked, self.scope, place.session.raw, self._owner)
        self._hold = hold
        place.holds.add(hold, place.session.connection)
        return hold

    async def _ask(self, place: Place, hold: Hold) -> None:
        """Ask for it in a place. Raises ``Busy``; nothing is held after any error."""
        ask = self._ask_in_transaction if self.scope == "transaction" else self._ask_in_session
        try:
            row = await ask(place, hold)
        except Busy:
            place.holds.remove(hold)
            raise
        except BaseException:
            await self._clean(place, hold)
            raise
        self._note_answer(hold, row or ())
        hold.state = State.HELD

    async def _ask_in_session(self, place: Place, hold: Hold) -> Row | None:
        return await carry_async(self._conversation(hold), partial(self._send, place, hold))

    async def _ask_in_transaction(self, place: Place, hold: Hold) -> Row | None:
        """Ask in the session's transaction, which the first lock begins in the same message."""
        begin = iter([statements.BEGIN] if self._is_outermost else [])

        async def send(statement: str) -> Row | None:
            return await self._send(place, hold, next(begin, "") + statement)

        try:
            return await carry_async(self._conversation(hold), send)
        except Busy:
            if self._is_outermost:
                await self._send(place, hold, "ROLLBACK")
            raise

    def _conversation(self, hold: Hold) -> Conversation:
        return take(hold.request, self.scope)

    async def _clean(self, place: Place, hold: Hold) -> None:
        """See to it that nothing remains. The end of a session's transaction, broken or not, is that of the session."""
        if self.scope == "transaction":
            place.session.end()
        else:
            others = place.holds.numbers(place.session.connection, without=hold)
            await carry_async(clean(hold.request, others=others), partial(self._send, place, hold))
        place.holds.remove(hold)

    async def _send(self, place: Place, hold: Hold, statement: str) -> Row | None:
        if statement == HANG_UP:
            place.session.end()
            return None
        try:
            return await place.session.send(place.holds.comment(without=hold) + statement)
        finally:
            if place.holds.due:
                place.holds.free_what_is_due()

    # Holding it

    @property
    def is_held(self) -> bool:
        hold = self._hold
        if hold is None:
            return self.is_open
        return self.is_open and hold.state is State.HELD and not hold.raw.closed

    def _why_lost(self) -> str:
        return "" if self.is_held and not self._place.session.has_ended else "its session is gone"

    # Giving it back

    async def release(self, error: BaseException | None = None) -> None:
        """Give the lock back, from whichever coroutine; ``error`` is what the body raised, and is kept if it was lost.

        Raises ``LockLost``, and ``LockError`` when it is not held.
        """
        if not self.is_open:
            raise LockError(f"Lock {self.name!r} is not held.", name=self.name, key=self.key)
        self.is_open = False
        if self._hold is not None and self._place.is_shared:
            await asyncio.shield(asyncio.ensure_future(self._give_back(self._hold, error)))
        elif self._hold is not None:
            await self._give_back(self._hold, error)
        self._note_given_back()

    async def _give_back(self, hold: Hold, error: BaseException | None) -> None:
        place = self._place
        if place.session.is_busy and not place.is_shared:
            # The coroutine that has the session waits there for another lock. Right after that, this one is freed.
            self.free_from_elsewhere()
            return
        try:
            reason = await self._free(place, hold)
        except BaseException:
            await self._clean(place, hold)
            raise
        finally:
            place.holds.remove(hold)
            self._places.leave(place)
        if reason is not None:
            self._note_lost(reason, error)

    async def _free(self, place: Place, hold: Hold) -> str | None:
        """Free the lock; return why that was not possible, or None."""
        if hold.state is State.OVER or place.session.has_ended:
            return self._reason or "its session is gone"
        try:
            if self.scope == "session":
                row = await self._send(
                    place, hold, statements.free_session(hold.request, hold.holds.limits_after(hold))
                )
                return None if row and row[0] else "PostgreSQL says that this session did not hold it"
            if place.depth == 1:
                await self._send(place, hold, "COMMIT")
        except DatabaseFailure as error:
            place.session.end()
            return f"its session has ended ({first_line(error)})"
        return None

    # For a response, which others close

    def detach(self) -> None:
        """Let the lock outlive the event loop and the coroutine that took it."""
        if self._hold is not None and not self._place.is_shared:
            self._places.detach(self._place.session)

    def free_from_elsewhere(self) -> None:
        hold, self.is_open = self._hold, False
        if hold is None or hold.state is State.OVER:
            return
        if self.scope == "session":
            hold.holds.free_from_elsewhere(hold)
        else:
            shut(hold.raw)
            hold.state = State.OVER
        self._leave_from_elsewhere()

    def _leave_from_elsewhere(self) -> None:
        """Say in the loop that the place is free, if there is a loop yet; else the session has no use any more."""
        loop = self._loop
        try:
            if loop is None:
                return
            loop.call_soon_threadsafe(self._places.leave, self._place)
        except RuntimeError:
            if not self._place.is_shared:
                self._place.session.end()


class AsyncSlotHandle(Slots, AsyncHandle):
    """One of several slots of a semaphore. ``key`` is the slot's once it is held."""

    def _may_ask(self, place: Place, request: Request) -> bool:
        return bool(self.request.without(place.holds.numbers(place.session.connection)).keys)

    def _conversation(self, hold: Hold) -> Conversation:
        return take_slot(hold.request, hold.scope, self._queue, inside=hold.scope == "transaction")
