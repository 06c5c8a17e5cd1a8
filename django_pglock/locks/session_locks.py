"""The records of a session: one for each lock that was acquired, or may have been acquired.

A transaction lock belongs to its transaction, or to the savepoint after which it was acquired, and PostgreSQL frees it.
A session lock belongs to its handle. If the handle is dropped without ``release()``, the lock is freed nevertheless.
Examples are a generator that is not run to its end, a response that is not sent, and an exception in the middle of
``acquire``. The record is made before the lock is requested, and is removed when it is certain that the lock is not
held. So an exception between any two instructions leaves no lock without a record.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from psycopg import Error as PsycopgError
from psycopg.pq import TransactionStatus

from django_pglock.keys import Key
from django_pglock.locks.options import Request
from django_pglock.locks.statements.fragments import MOST_NAMES, comment
from django_pglock.locks.statements.session_scope import free_if_held_statement, free_statement
from django_pglock.locks.statements.timeouts import SAVEPOINT
from django_pglock.locks.timer import call_later
from django_pglock.postgres.connections import has_ended, shut
from django_pglock.postgres.exchange import exchange_locked, if_unused

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

# One statement that sets, releases or goes back to a savepoint, or that ends the transaction.
_NAMED = r"(?P<verb>SAVEPOINT|RELEASE(?:\s+SAVEPOINT)?|ROLLBACK(?:\s+(?:WORK|TRANSACTION))?\s+TO(?:\s+SAVEPOINT)?)"
_STATEMENT = re.compile(
    rf"\s*(?:/\*.*?\*/\s*|--[^\n]*\n\s*)*(?:{_NAMED}\s+(?P<name>[^\s;]+)|(?P<end>COMMIT|END|ROLLBACK|ABORT|PREPARE\s+TRANSACTION)\b)",
    re.IGNORECASE | re.DOTALL,
)
# An end of the transaction after other statements of one text.
_LATER = re.compile(r";\s*(?:COMMIT|END|ROLLBACK|ABORT)\b", re.IGNORECASE)
#: Seconds until a lock that could not be freed is tried again. Doubled each time, up to the second number.
RETRY, LONGEST_RETRY = 0.02, 1.0


class RecordState(Enum):
    """The state of the locks of a record."""

    REQUESTED = "requested"  # without an answer: they may be held
    HELD = "held"
    ENDED = "ended"  # none of them is held


class LockRecord:
    """The locks of one acquire. ``raw`` is the psycopg connection of the session that has them."""

    __slots__ = ("comment", "locks", "owner", "queue", "raw", "request", "scope", "state")

    def __init__(self, locks: SessionLocks, request: Request, scope: str, raw: Any, owner: Any = None) -> None:
        self.locks = locks
        self.request = request
        self.scope = scope
        self.raw = raw
        #: The object that represents the coroutine that acquired them, if several coroutines share the session.
        self.owner = owner
        #: A semaphore's queue, if the lock of the queue is a session lock.
        self.queue: Key | None = None
        self.state = RecordState.REQUESTED
        #: The comment with the names, which is added to statements of the session while the locks are held.
        self.comment = comment(request.keys)

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of the locks."""
        return self.request.numbers

    @property
    def left_after_error(self) -> Request | None:
        """The locks that the session would keep after an error, because no transaction frees them."""
        keys = self.request.keys if self.scope == "session" else ()
        if self.queue is not None and self.state is RecordState.REQUESTED:
            keys += (self.queue,)
        return self.request._replace(keys=keys) if keys else None


class SessionLocks:
    """The records of one session, the oldest first, with the savepoints of its transaction in between."""

    # Several threads may change the lists at once: only by single operations, which are atomic.

    def __init__(self) -> None:
        self._all: list[LockRecord | str] = []
        #: The psycopg connection of the session.
        self._raw: Any = None
        #: Whether there may be records of transaction locks.
        self._has_transaction = False
        #: The session's idle limits as they were before the first ``max_hold``.
        self._limits: Sequence[str] = ()
        #: Records whose locks could not be freed when they had to be; ``free_pending`` frees them.
        self.pending: list[LockRecord] = []

    def __bool__(self) -> bool:
        return bool(self._all or self.pending)

    def records(self, connection: DatabaseWrapper) -> list[LockRecord]:
        """Return the records of the locks that are held, or may be held."""
        self.drop_ended(connection)
        return self._records()

    def _records(self) -> list[LockRecord]:
        return [each for each in self._all if isinstance(each, LockRecord)]

    def numbers(self, connection: DatabaseWrapper, *, without: LockRecord | None = None) -> frozenset[int]:
        """Return the numbers of the locks that are held, or may be held."""
        return frozenset(
            [number for record in self.records(connection) if record is not without for number in record.numbers]
        )

    def add(self, record: LockRecord, connection: DatabaseWrapper) -> None:
        """Add a record, before its locks are requested."""
        if self._all:
            self.drop_ended(connection)
        self._raw = record.raw
        self._has_transaction = self._has_transaction or record.scope == "transaction"
        self._all.append(record)

    def remove(self, record: LockRecord) -> None:
        """Note that no lock of a record is held any more."""
        self._drop(record)
        if self.pending:
            with suppress(ValueError):
                self.pending.remove(record)
        # Last, so that after an exception before this line there is still a record to clean up.
        record.state = RecordState.ENDED

    def _drop(self, each: LockRecord | str) -> None:
        try:  # noqa: SIM105 - suppress() would cost each lock three calls
            self._all.remove(each)
        except ValueError:
            pass

    def comment(self, *, without: LockRecord | None = None) -> str:
        """Return comments with the names of the held locks; only the latest, if there are many."""
        names: list[str] = []
        for each in reversed(self._all):
            if each is not without and isinstance(each, LockRecord):
                names.append(each.comment)
                if len(names) == MOST_NAMES:
                    break
        return "".join(reversed(names))

    # Ends of sessions and transactions, of which there is no notification

    def drop_ended(self, connection: DatabaseWrapper) -> None:
        """Remove the locks of a session that was closed, and of a transaction that has ended."""
        if not self._all:
            return
        if self._raw is not connection.connection:
            self._end(lambda each: True)
        elif self._has_transaction and self._raw.pgconn.transaction_status == TransactionStatus.IDLE:
            self._end(_is_of_transaction)
            self._has_transaction = any(
                isinstance(each, LockRecord) and each.scope == "transaction" for each in self._all
            )

    def _end(self, is_over: Callable[[LockRecord], bool], *, behind: int = 0) -> None:
        """Remove savepoints, and the records for which ``is_over`` is true."""
        for each in self._all[behind:]:
            if isinstance(each, str):
                self._drop(each)
            elif is_over(each):
                self.remove(each)

    def track_statement(self, sql: str) -> None:
        """Track the savepoints and the end of the caller's transaction, as far as they affect held locks."""
        if not self._has_transaction:
            return
        found = _STATEMENT.match(sql)
        if (found is not None and found["end"]) or _LATER.search(sql):
            # The text has several statements, and it is not known which of them were executed.
            self._end(_is_of_transaction)
        elif found is not None:
            self._track_savepoint(found["verb"].upper(), _folded(found["name"]))

    def _track_savepoint(self, verb: str, name: str) -> None:
        if name == SAVEPOINT:
            return
        if verb == "SAVEPOINT":
            self._all.append(name)
            return
        # An unknown savepoint is older than all held locks.
        place = max((place for place, each in enumerate(self._all) if each == name), default=-1)
        if verb.startswith("ROLLBACK"):
            self._end(_is_of_transaction, behind=place + 1)
        elif place >= 0:
            del self._all[place]

    # How long the session may be idle

    def remember_limits(self, record: LockRecord, before: Sequence[str]) -> None:
        """Store the session's idle limits from before the first lock with a ``max_hold``."""
        if not any(each.request.max_hold is not None for each in self._others(record)):
            self._limits = before

    def limits_without(self, record: LockRecord) -> Sequence[str]:
        """Return the idle limits after the end of a record: the shortest of the other records, or the original ones."""
        if record.request.max_hold is None:
            return ()
        others = [each.request.max_hold for each in self._others(record) if each.request.max_hold is not None]
        return [f"{min(others)}ms"] * 2 if others else self._limits

    def _others(self, record: LockRecord) -> list[LockRecord]:
        return [each for each in self._records() if each is not record and each.scope == "session"]

    # Free without the handle

    def free_from_any_thread(self, record: LockRecord) -> None:
        """Free a session lock whose handle no longer exists, without a wait. In any thread, also in a destructor.

        If the session is in use at this moment, its user frees the lock right after that. Otherwise a timer does.
        """
        if record.state is not RecordState.ENDED and record not in self.pending:
            self.pending.append(record)
            self.free_pending()
            if self.pending:
                call_later(RETRY, self._retry, 2 * RETRY)

    def _retry(self, pause: float) -> None:
        self.free_pending()
        if self.pending:
            call_later(pause, self._retry, min(2 * pause, LONGEST_RETRY))

    def free_pending(self) -> None:
        """Free the locks that could not be freed before, if the session is idle now. Thread-safe.

        A record stays pending until it is removed, so that an exception at any instruction leaves it here.
        """
        for record in list(self.pending):
            try:
                is_freed = has_ended(record.raw) or if_unused(record.raw, partial(self._free_now, record))
            except PsycopgError:
                # It is not known what the session holds. After the end of the session nothing is held.
                shut(record.raw)
                is_freed = True
            if is_freed:
                self.remove(record)

    def _free_now(self, record: LockRecord) -> None:
        """Free the locks of a record. The caller has the connection's lock, so only one thread frees a record."""
        statement = self._free_statement(record)
        if statement is not None:
            # If an exception interrupts this before the answer, the locks may still be held.
            record.state = RecordState.REQUESTED
            exchange_locked(record.raw, statement)
        self.remove(record)

    def _free_statement(self, record: LockRecord) -> str | None:
        if record.state is RecordState.ENDED:
            return None
        if record.state is RecordState.HELD and record.scope == "session":
            return free_statement(record.request, self.limits_without(record))
        left = record.left_after_error
        if left is not None:
            # PostgreSQL does not report how often the session holds a lock that other records have as well.
            others = [each for each in self._records() if each is not record]
            left = left.without({number for each in others for number in each.numbers})
        return free_if_held_statement(left) if left is not None and left.keys else None


def _is_of_transaction(record: LockRecord) -> bool:
    return record.scope == "transaction" and record.state is RecordState.HELD


def _folded(name: str) -> str:
    """Return an identifier as PostgreSQL reads it: in lower case unless it is quoted."""
    return name[1:-1].replace('""', '"') if name.startswith('"') else name.lower()
