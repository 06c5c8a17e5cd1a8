"""How the coroutines of an event loop exclude each other: in the process, each number of a lock has a queue.

All of them share a session, which is one holder for PostgreSQL. A number that is given back goes to the next coroutine
of its queue at once. PostgreSQL does not see the queues, so a circle of coroutines that wait for each other is found
here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from django.db import OperationalError
from psycopg.errors import DeadlockDetected

from django_pglock.errors import LockError
from django_pglock.locks.statements import Busy


@dataclass(eq=False, slots=True)
class Turn:
    """The place of one coroutine in the queues of its numbers."""

    #: Not the asyncio task itself, because the result of the task may be a handle, which would then be a circle of
    #: references.
    owner: ref[asyncio.Task[Any]]
    shared: bool
    #: Whether it needs a session of its own.
    needs_session: bool
    #: The numbers that it has here, or waits for.
    numbers: list[int] = field(default_factory=list)
    #: The session in which it has them on the server.
    session: Any = None
    #: The number that it waits for, and the future that is done when it has it.
    waits_for: int | None = None
    is_next: asyncio.Future[None] | None = None


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


class Queues:
    """The queues of one event loop, for one database alias."""

    def __init__(self) -> None:
        self._queues: dict[int, Queue] = {}
        #: The turns of each coroutine.
        self._turns: dict[ref[asyncio.Task[Any]], list[Turn]] = {}
        #: Done when a coroutine gives a number back; None if no coroutine waits for that.
        self._change: asyncio.Future[None] | None = None

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
