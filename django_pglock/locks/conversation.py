"""What is said to PostgreSQL to take and to free a lock, whoever carries the messages.

A conversation is a generator: it yields a statement, gets the last row of its answer or the error it met, and returns
what came of it. Where it cannot know what the session holds it yields ``HANG_UP`` instead: without the session no lock
remains. Threads carry it over Django's connection, coroutines over one of their own, so that both say the same.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from django.db import Error as DjangoFailure
from psycopg import Error as PsycopgFailure
from psycopg.errors import LockNotAvailable as ServerTimeout

from django_pglock.keys import Key
from django_pglock.locks import statements
from django_pglock.locks.options import Request

Row = Sequence[Any]
#: None is the answer of a statement that has no rows.
Conversation = Generator[str, "Row | None", "Row | None"]
Failure = (DjangoFailure, PsycopgFailure)
#: Not a statement: end the session.
HANG_UP = ""
#: A waiter for one of several slots blocks on one of them, and looks at all again after this many milliseconds.
SLICE = 100


def take(request: Request, scope: str, *, held: AbstractSet[int] = frozenset(), in_test: bool = False) -> Conversation:
    """Ask for locks of ``scope``; the row returned is None when they are busy.

    ``held``: the numbers that the session has already. ``in_test``: the session lock is taken inside the transaction
    that ``TestCase`` has opened.
    """
    if scope == "session":
        return _try_session(request, held) if request.wait == 0 else _wait_for_session(request, held, in_test)
    if request.wait == 0 and len(request.keys) == 1:
        return _try_transaction(request)
    return _wait_for_transaction(request)


def _try_session(request: Request, held: AbstractSet[int]) -> Conversation:
    try:
        row = yield statements.try_session(request)
    except BaseException:
        yield from _clean_up(request, held)
        raise
    return row if row and row[0] else None


def _wait_for_session(request: Request, held: AbstractSet[int], in_test: bool) -> Conversation:
    try:
        row = yield statements.wait_session_inside(request) if in_test else statements.wait_session(request)
    except BaseException as error:
        is_busy = _is_our_timeout(error, request)
        if in_test:
            yield statements.BACK_TO_SAVEPOINT
            yield from _clean_up(request.without(held), frozenset())
        elif not is_busy:
            yield from _clean_up(request, held)
        if is_busy:
            return None
        raise
    return row or (True,)


def _clean_up(request: Request, held: AbstractSet[int]) -> Conversation:
    """See to it that no session lock stays after an error.

    A statement that was cancelled, or whose answer was lost, may have taken its locks all the same. How often a
    session has a lock that it had before cannot be asked.
    """
    if not held.isdisjoint(key.number for key in request.keys):
        yield HANG_UP
        return None
    try:
        yield statements.free_if_granted(request)
    except BaseException:  # noqa: BLE001 - the first error is raised
        yield HANG_UP
    return None


def _try_transaction(request: Request) -> Conversation:
    row = yield statements.try_transaction(request)
    return row if row and row[0] else None


def _wait_for_transaction(request: Request) -> Conversation:
    try:
        row = yield statements.wait_transaction(request)
    except Failure as error:
        if not _is_our_timeout(error, request):
            raise
        yield statements.BACK_TO_SAVEPOINT
        return None
    return row or (True,)


def _is_our_timeout(error: BaseException, request: Request) -> bool:
    # Without a limit of ours it is somebody else's lock_timeout, which does not mean "busy".
    return request.wait is not None and (isinstance(error, ServerTimeout) or isinstance(error.__cause__, ServerTimeout))


def take_any(slots: Sequence[Key], request: Request, scope: str, *, in_test: bool = False) -> Conversation:
    """Ask for one lock of several; the row returned is its number, or None when all are busy.

    PostgreSQL cannot wait for one of several. So a waiter blocks on one of them, chosen by chance, and from time to
    time looks whether another has become free.
    """
    function = "pg_try_advisory_lock" if scope == "session" else "pg_try_advisory_xact_lock"
    deadline = None if request.wait is None else time.monotonic() + request.wait / 1000
    while True:
        row = yield statements.try_any(random.sample(slots, len(slots)), function)
        if row is not None:
            return row
        left = SLICE if deadline is None else min(SLICE, math.ceil((deadline - time.monotonic()) * 1000))
        if left <= 0:
            return None
        slot = random.choice(slots)  # noqa: S311 - chance, not a secret
        one = request._replace(keys=(slot,), wait=left)
        if (yield from take(one, scope, in_test=in_test)) is not None:
            return (slot.number,)


def carry(conversation: Conversation, send: Callable[[str], Row | None]) -> Row | None:
    """Hold a conversation: ``send`` sends a statement and returns the last row of its answer, or obeys ``HANG_UP``."""
    try:
        statement = next(conversation)
        while True:
            try:
                row = send(statement)
            except BaseException as error:  # noqa: BLE001, PERF203 - the conversation decides
                statement = conversation.throw(error)
            else:
                statement = conversation.send(row)
    except StopIteration as end:
        answer: Row | None = end.value
        return answer


async def carry_async(conversation: Conversation, send: Callable[[str], Awaitable[Row | None]]) -> Row | None:
    """Hold a conversation; as ``carry``."""
    try:
        statement = next(conversation)
        while True:
            try:
                row = await send(statement)
            except BaseException as error:  # noqa: BLE001, PERF203 - the conversation decides
                statement = conversation.throw(error)
            else:
                statement = conversation.send(row)
    except StopIteration as end:
        answer: Row | None = end.value
        return answer
