"""The threads and coroutines of this process that wait for an answer of PostgreSQL, and their sessions.

If libpq's status of a session is active, this does not mean that a thread waits for the server: a program may be
reading the rows of a long answer. So the stacks of the threads are read. A thread that waits for an answer is in
psycopg's ``Connection.wait()`` or in our own exchange, whatever has sent the statement: a cursor, BEGIN, COMMIT,
Django's health check, the start of a session, a pool. A coroutine does not wait in a thread. Its sessions are our own,
and record whether a statement is running.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from django_pglock.postgres import async_sessions, libpq
from django_pglock.postgres.connection_registry import aliases
from django_pglock.postgres.thread_stacks import stacks

#: The functions in which a thread waits, each with its two local variables: the connection, and an object that belongs
#: to the statement.
WAITING = {psycopg.Connection.wait.__code__: ("self", "gen"), libpq.exchange_locked.__code__: ("raw", "message")}
#: The largest number of psycopg's own frames between the wait and the frame that blocks.
MOST_FRAMES = 8


@dataclass(frozen=True)
class PendingStatement:
    """A statement whose answer a thread or a coroutine waits for, on a psycopg connection.

    ``thread`` is the name and ``ident`` the ident of the thread; None for a coroutine. ``alias`` is the database alias;
    None for a connection that is not Django's.
    """

    raw: Any
    alias: str | None
    thread: str | None = None
    ident: int | None = None
    #: An object that belongs only to this statement. The reference ensures that no later statement gets the same
    #: ``id()``.
    statement: Any = field(default=None, compare=False, repr=False)

    def continues(self, earlier: PendingStatement) -> bool:
        """Return whether this is still the wait for the same answer."""
        return self == earlier and self.statement is earlier.statement


def pending_statements() -> list[PendingStatement]:
    """Return the statements that wait for an answer now, without those of the calling thread."""
    return [*_waits_of_threads(), *_waits_of_coroutines()]


def _waits_of_threads() -> Iterator[PendingStatement]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    known = aliases()
    with stacks() as innermost:
        awaited = {ident: _awaited_in(frame) for ident, frame in innermost.items() if ident != threading.get_ident()}
    for ident, (raw, statement) in awaited.items():
        if raw is not None and _is_active(raw):
            alias = known.get(id(raw)) or known.get(id(getattr(raw, "_pool", None)))
            yield PendingStatement(raw, alias, names.get(ident, str(ident)), ident, statement)


def _waits_of_coroutines() -> Iterator[PendingStatement]:
    for session in async_sessions.busy():
        if _is_active(session.raw):
            yield PendingStatement(session.raw, session.connection.alias, statement=session.statement)


def _awaited_in(innermost: FrameType | None) -> tuple[Any, Any]:
    frame = innermost
    for _ in range(MOST_FRAMES):
        if frame is None:
            break
        if names := WAITING.get(frame.f_code):
            found = frame.f_locals
            return found.get(names[0]), found.get(names[1])
        frame = frame.f_back
    return None, None


def _is_active(raw: Any) -> bool:
    return bool(raw.pgconn.transaction_status == TransactionStatus.ACTIVE)
