"""The session locks of a session: a record of each one that was acquired, or may have been acquired.

A transaction lock belongs to its transaction, and PostgreSQL frees it. A session lock belongs to its handle. If the
handle is dropped without ``release()``, the lock is freed nevertheless. Examples are a generator that is not run to its
end, a response that is not sent, and an exception in the middle of ``acquire``. The record is made before the lock is
requested, and is removed when it is certain that the lock is not held. So an exception between any two instructions
leaves no lock without a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from psycopg import Error as PsycopgError

from django_pglock.locks.request import Request
from django_pglock.locks.retries import retry
from django_pglock.locks.statements import free_if_held_statement, free_statement
from django_pglock.postgres.connections import has_ended, shut
from django_pglock.postgres.exchange import exchange_locked, if_unused
from django_pglock.postgres.message import is_djangos_function

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

_ATTRIBUTE = "_django_pglock_locks"
# Each lock asks for the same function, that of its backend.
_is_djangos = lru_cache(maxsize=64)(is_djangos_function)


class RecordState(Enum):
    """The state of the locks of a record."""

    REQUESTED = "requested"  # without an answer: they may be held
    HELD = "held"
    ENDED = "ended"  # none of them is held


@dataclass(eq=False, slots=True)
class LockRecord:
    """The session locks of one acquire. ``raw`` is the psycopg connection of the session that has them."""

    locks: SessionLocks
    request: Request
    raw: Any
    state: RecordState = RecordState.REQUESTED


class SessionLocks:
    """The records of one session, the oldest first."""

    # Several threads may change the lists at once: only by single operations, which are atomic.

    def __init__(self) -> None:
        self._records: dict[int, LockRecord] = {}
        self._raw: Any = None
        #: The session's idle limits as they were before the first ``max_hold``.
        self._limits: Sequence[str] = ()
        #: Records whose locks could not be freed when they had to be; ``free_pending`` frees them.
        self.pending: list[LockRecord] = []

    def records(self, raw: Any) -> list[LockRecord]:
        """Return the records of the present session, whose psycopg connection is ``raw``; forget earlier sessions."""
        if self._raw is not raw:
            for record in list(self._records.values()):
                self.remove(record)
            self._raw = raw
        return list(self._records.values())

    def numbers(self, *, without: LockRecord | None = None) -> frozenset[int]:
        """Return the numbers of the locks that are held, or may be held."""
        records = list(self._records.values())
        return frozenset([number for each in records if each is not without for number in each.request.numbers])

    def add(self, record: LockRecord) -> None:
        """Add a record, before its locks are requested."""
        if self._raw is not record.raw:
            self.records(record.raw)
        self._records[id(record)] = record

    def remove(self, record: LockRecord) -> None:
        """Note that no lock of a record is held any more."""
        self._records.pop(id(record), None)
        if self.pending:
            with suppress(ValueError):
                self.pending.remove(record)
        # Last, so that after an exception before this line there is still a record to clean up.
        record.state = RecordState.ENDED

    # How long the session may be idle

    def remember_limits(self, record: LockRecord, before: Sequence[str]) -> None:
        """Store the session's idle limits from before the first lock with a ``max_hold``."""
        if not self._other_limits(record):
            self._limits = before

    def limits_without(self, record: LockRecord) -> Sequence[str]:
        """Return the idle limits after the end of a record: the shortest of the other records, or the original ones."""
        if record.request.max_hold is None:
            return ()
        others = self._other_limits(record)
        return [f"{min(others)}ms"] * 2 if others else self._limits

    def _other_limits(self, record: LockRecord) -> list[int]:
        others = [each.request.max_hold for each in list(self._records.values()) if each is not record]
        return [limit for limit in others if limit is not None]

    # Free without the handle

    def free_from_any_thread(self, record: LockRecord) -> bool:
        """Free the locks of a handle that no longer exists, without a wait. In any thread, also in a destructor.

        If the session is in use at this moment, another thread frees them soon. Returns whether they had to be freed.
        """
        if record.state is RecordState.ENDED or record in self.pending:
            return False
        self.pending.append(record)
        if not self.free_pending():
            retry(self.free_pending)
        return True

    def free_pending(self) -> bool:
        """Free the locks that could not be freed before, if the session is idle now. Thread-safe.

        Returns whether none is left.

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
        return not self.pending

    def _free_now(self, record: LockRecord) -> None:
        """Free the locks of a record. The caller has the connection's lock, so only one thread frees a record."""
        statement = self._free_statement(record)
        if statement is not None:
            # If an exception interrupts this before the answer, the locks may still be held.
            record.state = RecordState.REQUESTED
            exchange_locked(record.raw, statement)
        self.remove(record)

    def _free_statement(self, record: LockRecord) -> str | None:
        if record.state is RecordState.HELD:
            return free_statement(record.request, self.limits_without(record))
        # PostgreSQL does not report how often the session holds a lock that other records have as well.
        left = record.request.without(self.numbers(without=record))
        return free_if_held_statement(left) if left.keys and record.state is RecordState.REQUESTED else None


def session_locks_of(connection: DatabaseWrapper) -> SessionLocks:
    """Return the records of the locks that the session of a Django connection holds."""
    locks: SessionLocks | None = connection.__dict__.get(_ATTRIBUTE)
    if locks is None:
        locks = connection.__dict__[_ATTRIBUTE] = SessionLocks()
    elif locks.pending:
        locks.free_pending()
    return locks


def holds_locks(connection: DatabaseWrapper) -> bool:
    """Return whether the session of a Django connection holds session locks of this package, or may hold them."""
    locks: SessionLocks | None = connection.__dict__.get(_ATTRIBUTE)
    return locks is not None and bool(locks.pending or locks.records(connection.connection))


def keep_out_of_pool(connection: DatabaseWrapper) -> None:
    """Ensure that a session does not return to a pool with a lock. The next user would then hold the lock.

    The backends of other packages may have a pool of their own, from which they take their sessions.
    """
    if connection.settings_dict["OPTIONS"].get("pool") or not _is_djangos(type(connection).get_new_connection):
        connection.close = partial(_close_pooled, connection)  # type: ignore[method-assign]


def _close_pooled(connection: DatabaseWrapper) -> None:
    if connection.connection is not None and holds_locks(connection):
        # The pool notices that the session is closed, and opens another. The close() of a pool's own class of
        # connections would only return the session to the pool.
        connection.connection.pgconn.finish()
    connection.__dict__.pop("close", None)
    connection.close()
