"""The transaction that a transaction lock opens if the caller has none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import transaction
from psycopg.pq import TransactionStatus

from django_pglock.postgres.connections import end_session, shut_down_socket, transaction_status

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper


class OwnTransaction:
    """A transaction that a lock opens. If an exception interrupts it, it is ended."""

    def __init__(self, connection: DatabaseWrapper) -> None:
        self._connection = connection
        self._atomic = transaction.atomic(using=connection.alias)
        # Inside of a TestCase it is a savepoint of the test's transaction.
        self._is_outermost = not connection.in_atomic_block

    def begin(self) -> None:
        """Begin the transaction."""
        self._atomic.__enter__()

    def end(self, error: BaseException | None) -> None:
        """Commit the transaction, or roll it back if there was an error."""
        try:
            if self._connection.atomic_blocks[-1:] == [self._atomic]:
                # Not by its truth: an exception with a length of 0 is false.
                kind, trace = (None, None) if error is None else (type(error), error.__traceback__)
                self._atomic.__exit__(kind, error, trace)
        finally:
            if self._is_outermost and not self._is_over():
                end_session(self._connection)

    def abandon(self, *, is_here: bool) -> None:
        """End the transaction by ending its session. ``is_here``: called in the thread that has begun it."""
        if not self._is_outermost or self._is_over():
            return
        if is_here:
            end_session(self._connection)
        else:
            shut_down_socket(self._connection)

    def _is_over(self) -> bool:
        connection = self._connection
        if connection.connection is None:
            return True
        is_idle = transaction_status(connection) in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN)
        return is_idle and not connection.in_atomic_block and connection.autocommit
