"""What is said to PostgreSQL to take locks, and what is said when an error leaves it open whether they were taken.

A conversation is a generator: it yields a statement, gets the row of its answer or the error it met, and returns what
came of it. Where it cannot know what the session holds it yields ``HANG_UP`` instead: without the session no lock
remains. Threads carry it over Django's connection, coroutines over one of their own, so that both say the same.
"""

from __future__ import annotations

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
Steps = Generator[str, "Row | None", "Row | None"]
Failure = (DjangoFailure, PsycopgFailure)
#: Not a statement: end the session.
END_SESSION = ""


class Busy(Exception):
    """Somebody else has the lock. Its cause is the server's own error, if the server waited for it."""


class StaleSnapshot(Exception):
    """The transaction would not see what the last holder has committed. Nothing was locked."""


def take(request: Request, scope: str, *, in_test: bool = False) -> Steps:
    """Ask for locks of ``scope``. Raises ``Busy`` and ``Stale``; nothing is held then.

    ``in_test``: the session lock is taken inside the transaction that ``TestCase`` has opened. After any other error
    the session may have the locks all the same; see ``clean``.
    """
    if scope == "session":
        return _try_session(request) if request.wait == 0 else _wait_for_session(request, in_test)
    if request.wait == 0 and len(request.keys) == 1:
        return _try_transaction(request)
    return _wait_for_transaction(request)


def free_after_error(request: Request, *, others: AbstractSet[int]) -> Steps:
    """See to it that no session lock of a request stays after an error.

    A statement that was cancelled, or whose answer was lost, may have taken its locks all the same. ``others`` are the
    numbers that the session holds besides: how often it has one of those cannot be asked.
    """
    if not others.isdisjoint(request.numbers):
        yield END_SESSION
        return None
    try:
        yield statements.free_if_granted(request)
    except BaseException:  # noqa: BLE001 - the first error is raised
        yield END_SESSION
    return None


def _try_session(request: Request) -> Steps:
    return _granted((yield statements.try_session(request)))


def _wait_for_session(request: Request, in_test: bool) -> Steps:
    if not in_test:
        try:
            return (yield statements.wait_session(request)) or (True,)
        except Failure as error:
            _raise_if_busy(error, request)
            raise
    try:
        return (yield statements.wait_session_inside(request)) or (True,)
    except Failure as error:
        # The session lock itself was waited for, and may be granted in the moment in which its limit is reported.
        yield from _back_without(request)
        _raise_if_busy(error, request)
        raise


def _back_without(request: Request) -> Steps:
    """Go back to the savepoint before the wait, where the transaction is usable, and free what is the session's."""
    try:
        yield statements.BACK_TO_SAVEPOINT
        yield statements.free_if_granted(request)
    except BaseException:  # noqa: BLE001 - the first error is raised
        yield END_SESSION
    return None


def _try_transaction(request: Request) -> Steps:
    return _granted(_fresh((yield statements.try_transaction(request))))


def _wait_for_transaction(request: Request) -> Steps:
    try:
        row = yield statements.wait_transaction(request)
    except Failure as error:
        if is_our_timeout(error, request):
            yield statements.BACK_TO_SAVEPOINT
        _raise_if_busy(error, request)
        raise
    # A wrapper that looks at what comes back may have passed over the row, which is not that of the last statement.
    return _fresh(row if row is not None else (yield statements.is_fresh(request)))


def _granted(row: Row | None) -> Row:
    if row is None or not row[0]:
        raise Busy
    return row


def _fresh(row: Row | None) -> Row:
    if row is None or row[0] is None:
        raise StaleSnapshot
    return row


def _raise_if_busy(error: BaseException, request: Request) -> None:
    if is_our_timeout(error, request):
        raise Busy from error


def is_our_timeout(error: BaseException, request: Request) -> bool:
    """Say whether the server reports that the request's own time is over."""
    # Without a limit of ours it is somebody else's lock_timeout, which does not mean "busy".
    return request.wait is not None and (isinstance(error, ServerTimeout) or isinstance(error.__cause__, ServerTimeout))


def take_slot(request: Request, scope: str, queue: Key, *, inside: bool = False) -> Steps:
    """Ask for one lock of several; the row's first column is its number. Raises as ``take`` does.

    ``queue`` is the lock for which all who wait queue up. ``inside``: within a transaction.
    """
    function = "pg_try_advisory_lock" if scope == "session" else "pg_try_advisory_xact_lock"
    if request.wait == 0:
        return _try_slot(request, function, None if inside else queue)
    if inside:
        return _wait_for_slot_inside(request, function, queue)
    return _wait_for_slot(request, function, queue)


def _try_slot(request: Request, function: str, queue: Key | None) -> Steps:
    return _granted((yield statements.try_slot(request, function, queue)))


def _wait_for_slot(request: Request, function: str, queue: Key) -> Steps:
    try:
        return _granted((yield statements.wait_for_slot(request, function, queue)))
    except Failure as error:
        _raise_if_busy(error, request)
        raise


def _wait_for_slot_inside(request: Request, function: str, queue: Key) -> Steps:
    try:
        row = yield statements.wait_for_slot_inside(request, function, queue)
    except Failure as error:
        yield from _back_without(request._replace(keys=(queue,), shared=False))
        _raise_if_busy(error, request)
        raise
    if row is None:
        # As in _wait_for_transaction.
        row = yield statements.held_slot(request)
    if row is not None and row[1] is None:
        raise StaleSnapshot
    return _granted(row)


def run_steps(conversation: Steps, send: Callable[[str], Row | None]) -> Row | None:
    """Hold a conversation: ``send`` sends a statement and returns the row of its answer, or obeys ``HANG_UP``."""
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


async def run_steps_async(conversation: Steps, send: Callable[[str], Awaitable[Row | None]]) -> Row | None:
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
