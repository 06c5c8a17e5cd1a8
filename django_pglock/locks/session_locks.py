"""What a session holds: every lock that was taken, or may have been, with the one thing to which it is tied.

A transaction lock is tied to its transaction, or to the savepoint behind which it was taken, and PostgreSQL frees it. A
session lock is tied to its handle: who drops the handle without a word (a generator that nobody goes on with, a
response that is never sent, an exception in the middle of ``acquire``) has the lock freed all the same. The session
knows it from before the question until it is certain that nothing is held, so that an exception between any two
instructions leaves no lock that nobody knows of.

One execute wrapper, installed when the connection is opened and never removed, names in a comment what is held, and
learns of savepoints. It stands below all others, who may add and remove theirs as they please.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db.backends.signals import connection_created
from psycopg import Error as PsycopgError
from psycopg.pq import TransactionStatus

from django_pglock.keys import Key
from django_pglock.locks.options import Request
from django_pglock.locks.statements.fragments import MOST_NAMES, comment
from django_pglock.locks.statements.session_scope import free_if_held, free_session_locks
from django_pglock.locks.statements.timeouts import SAVEPOINT
from django_pglock.locks.timer import call_later
from django_pglock.postgres.connections import has_ended, shut
from django_pglock.postgres.libpq import exchange_unless_used
from django_pglock.postgres.message import OWN_WRAPPERS

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

# One statement that makes, frees or goes back to a savepoint, or that ends the transaction.
_NAMED = r"(?P<verb>SAVEPOINT|RELEASE(?:\s+SAVEPOINT)?|ROLLBACK(?:\s+(?:WORK|TRANSACTION))?\s+TO(?:\s+SAVEPOINT)?)"
_STATEMENT = re.compile(
    rf"\s*(?:/\*.*?\*/\s*|--[^\n]*\n\s*)*(?:{_NAMED}\s+(?P<name>[^\s;]+)|(?P<end>COMMIT|END|ROLLBACK|ABORT|PREPARE\s+TRANSACTION)\b)",
    re.IGNORECASE | re.DOTALL,
)


# The same, behind other statements of one text.
_LATER = re.compile(r";\s*(?:COMMIT|END|ROLLBACK|ABORT)\b", re.IGNORECASE)
#: Seconds until what could not be freed is tried again; doubled each time up to the second number.
RETRY, LONGEST_RETRY = 0.02, 1.0


class RecordState(Enum):
    """What is known of a hold."""

    REQUESTED = "asked"  # the answer is not known: it may be held
    HELD = "held"
    ENDED = "over"


class LockRecord:
    """The locks of one acquire. ``raw`` is the psycopg connection of the session that has them."""

    __slots__ = ("comment", "locks", "owner", "queue", "raw", "request", "scope", "state")

    def __init__(self, locks: SessionLocks, request: Request, scope: str, raw: Any, owner: Any = None) -> None:
        self.locks = locks
        self.request = request
        self.scope = scope
        self.raw = raw
        #: What stands for the coroutine that has it, where several share a session.
        self.owner = owner
        #: A semaphore's queue, if its lock is one of the session.
        self.queue: Key | None = None
        self.state = RecordState.REQUESTED
        #: Names its locks in the statements that its session sends meanwhile.
        self.comment = comment(request.keys)

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of its locks."""
        return self.request.numbers

    @property
    def left_after_error(self) -> Request | None:
        """What of it would stay with the session after an error: no transaction takes it along."""
        keys = self.request.keys if self.scope == "session" else ()
        if self.queue is not None and self.state is RecordState.REQUESTED:
            keys += (self.queue,)
        return self.request._replace(keys=keys) if keys else None


class SessionLocks:
    """The holds of one session, the oldest first, with the savepoints of its transaction in between."""

    # What several threads change at once is changed by single operations of lists, which are atomic.

    def __init__(self) -> None:
        self._all: list[LockRecord | str] = []
        #: The psycopg connection that has them.
        self._raw: Any = None
        #: Whether some of them may be the transaction's.
        self._has_transaction = False
        #: The session's idle limits as they were before the first ``max_hold``.
        self._limits: Sequence[str] = ()
        #: Holds that could not be freed in the moment in which they had to be. ``free_what_is_due`` frees them.
        self.pending: list[LockRecord] = []

    def __bool__(self) -> bool:
        return bool(self._all or self.pending)

    def records(self, connection: DatabaseWrapper) -> list[LockRecord]:
        """Return what is held, or may be."""
        self.drop_ended(connection)
        return [each for each in self._all if isinstance(each, LockRecord)]

    def numbers(self, connection: DatabaseWrapper, *, without: LockRecord | None = None) -> frozenset[int]:
        """Return the numbers of the locks that are held, or may be."""
        return frozenset(
            [number for record in self.records(connection) if record is not without for number in record.numbers]
        )

    def add(self, record: LockRecord, connection: DatabaseWrapper) -> None:
        """Note a hold, before it is asked for."""
        if self._all:
            self.drop_ended(connection)
        self._raw = record.raw
        self._has_transaction = self._has_transaction or record.scope == "transaction"
        self._all.append(record)

    def remove(self, record: LockRecord) -> None:
        """Note that nothing of a hold is held any more."""
        self._drop(record)
        # Last: an exception that comes before finds something to clean up.
        record.state = RecordState.ENDED

    def _drop(self, each: LockRecord | str) -> None:
        try:  # noqa: SIM105 - suppress() would cost each lock three calls
            self._all.remove(each)
        except ValueError:
            pass

    def comment(self, *, without: LockRecord | None = None) -> str:
        """Return comments that name what is held; the latest, if that is much."""
        names: list[str] = []
        for each in reversed(self._all):
            if each is not without and isinstance(each, LockRecord):
                names.append(each.comment)
                if len(names) == MOST_NAMES:
                    break
        return "".join(reversed(names))

    # Ends that nobody announces

    def drop_ended(self, connection: DatabaseWrapper) -> None:
        """Forget the locks of a session that was closed, and of a transaction that has ended."""
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
        """Forget savepoints, and the holds of which something is true."""
        for each in self._all[behind:]:
            if isinstance(each, str):
                self._drop(each)
            elif is_over(each):
                self.remove(each)

    def track_statement(self, sql: str) -> None:
        """Follow the savepoints of the caller's transaction, as far as they matter for what is held."""
        if not self._has_transaction:
            return
        found = _STATEMENT.match(sql)
        if (found is not None and found["end"]) or _LATER.search(sql):
            # Of a text with several statements it is not known how far they came.
            self._end(_is_of_transaction)
        elif found is not None:
            self._track_savepoint(found["verb"].upper(), _folded(found["name"]))

    def _track_savepoint(self, verb: str, name: str) -> None:
        if name == SAVEPOINT:
            return
        if verb == "SAVEPOINT":
            self._all.append(name)
            return
        # An unknown savepoint is older than everything that is held.
        place = max((place for place, each in enumerate(self._all) if each == name), default=-1)
        if verb.startswith("ROLLBACK"):
            self._end(_is_of_transaction, behind=place + 1)
        elif place >= 0:
            del self._all[place]

    # How long the session may be idle

    def remember_limits(self, record: LockRecord, before: Sequence[str]) -> None:
        """Remember the session's limits as they were before the first hold with a limit of its own."""
        if not any(each.request.max_hold is not None for each in self._others(record)):
            self._limits = before

    def limits_without(self, record: LockRecord) -> Sequence[str]:
        """Return the limits to set when a hold is freed: those of the others, or those from before."""
        if record.request.max_hold is None:
            return ()
        others = [each.request.max_hold for each in self._others(record) if each.request.max_hold is not None]
        return [f"{min(others)}ms"] * 2 if others else self._limits

    def _others(self, record: LockRecord) -> list[LockRecord]:
        return [
            each
            for each in self._all
            if isinstance(each, LockRecord) and each is not record and each.scope == "session"
        ]

    # Freeing from elsewhere

    def free_from_any_thread(self, record: LockRecord) -> None:
        """Free a session lock whose owner is gone: from any thread, in the middle of anything, waiting for nothing.

        If the session is in use at this moment, its user frees the lock right after, or else an alarm does.
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
        """Free what could not be freed before, if the session is at rest now. Several threads may come here at once."""
        for _ in range(len(self.pending)):
            try:
                record = self.pending.pop(0)
            except IndexError:
                return
            if record.state is RecordState.ENDED or self._free_now(record):
                self.remove(record)
            else:
                self.pending.append(record)

    def _free_now(self, record: LockRecord) -> bool:
        if has_ended(record.raw):
            return True
        statement = self._to_free(record)
        try:
            return statement is None or exchange_unless_used(record.raw, statement)
        except PsycopgError:
            # What it holds cannot be known any more. Without the session nothing is held.
            shut(record.raw)
            return True

    def _to_free(self, record: LockRecord) -> str | None:
        if record.state is RecordState.HELD and record.scope == "session":
            return free_session_locks(record.request, self.limits_without(record))
        left = record.left_after_error
        if left is not None:
            # How often the session has what others hold here as well cannot be asked.
            others = [each for each in self._all if isinstance(each, LockRecord) and each is not record]
            left = left.without({number for each in others for number in each.numbers})
        return free_if_held(left) if left is not None and left.keys else None


def _is_of_transaction(record: LockRecord) -> bool:
    return record.scope == "transaction" and record.state is RecordState.HELD


def _folded(name: str) -> str:
    """Return a name as PostgreSQL reads it."""
    return name[1:-1].replace('""', '"') if name.startswith('"') else name.lower()


_ATTRIBUTE = "_django_pglock_locks"


def session_locks_of(connection: DatabaseWrapper) -> SessionLocks:
    """Return what the session of a Django connection holds."""
    locks: SessionLocks | None = connection.__dict__.get(_ATTRIBUTE)
    if locks is None:
        locks = connection.__dict__[_ATTRIBUTE] = SessionLocks()
        install_wrapper(connection)
    elif locks.pending:
        locks.free_pending()
    return locks


def keep_out_of_pool(connection: DatabaseWrapper) -> None:
    """See to it that a session of Django's pool does not go back there with a lock, to be the next user's."""
    if connection.settings_dict["OPTIONS"].get("pool"):
        connection.close = partial(_close_pooled, connection)  # type: ignore[method-assign]


def _close_pooled(connection: DatabaseWrapper) -> None:
    locks = session_locks_of(connection)
    if connection.connection is not None and any(record.scope == "session" for record in locks.records(connection)):
        # The pool will see that, and open another.
        connection.connection.close()
    connection.__dict__.pop("close", None)
    connection.close()


def install_wrapper(connection: Any, **kwargs: Any) -> None:
    """Install the wrapper, below all others and once."""
    if connection.vendor == "postgresql" and _wrapper not in connection.execute_wrappers:
        connection.execute_wrappers.insert(0, _wrapper)


def _wrapper(execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
    connection = context["connection"]
    locks: SessionLocks | None = connection.__dict__.get(_ATTRIBUTE)
    if not locks:
        return execute(sql, params, many, context)
    if locks.pending:
        locks.free_pending()
    locks.drop_ended(connection)
    try:
        result = execute(_with_names(sql, locks.comment(), connection), params, many, context)
    finally:
        if locks.pending:
            locks.free_pending()
    if locks:
        locks.track_statement(sql if isinstance(sql, str) else sql.as_string(connection.connection))
    return result


def _with_names(sql: Any, names: str, connection: Any) -> Any:
    """Add the names of what is held to a statement, for pg_stat_activity shows a session's last one.

    A comment that is there already stays the first one: it may be a hint for the planner. Other wrappers may look at
    how a statement begins, so where there are any, the names are its end.
    """
    if not names or not isinstance(sql, str) or sql.lstrip().startswith("/*"):
        return sql
    return names + sql if len(connection.execute_wrappers) == 1 else f"{sql} {names}"


OWN_WRAPPERS.append(_wrapper)
connection_created.connect(install_wrapper, dispatch_uid="django_pglock.locks.held_locks")
