"""Claims on any table: one statement takes free rows, and skips rows that another process has locked.

Nothing here depends on tasks. Give your own model a ``ClaimManager``, and claim its rows as a worker claims tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

from django.db import InterfaceError, OperationalError, models
from django.db.transaction import atomic

from django_pglock.loggers import get_logger
from django_pglock.postgres.connections import transaction_block
from django_pglock.store.marking import first_free, mark

__all__ = ["ClaimManager", "ClaimQuerySet"]

logger = get_logger("django_pglock.claims")

Row = TypeVar("Row", bound=models.Model)


class ClaimedRows(Generic[Row]):
    """Rows that are locked for the caller until the end of the transaction. Claims of other processes skip them.

    As a context manager it opens a transaction, or a savepoint in yours, and returns the list of the rows. Leave the
    block to commit your changes and to release the rows. An exception rolls the changes back, and also releases the
    rows. Inside your own ``atomic()`` you can also just iterate; then the rows are locked when they are first read.
    """

    def __init__(self, queryset: models.QuerySet[Row]) -> None:
        self._queryset = queryset
        self._block = ExitStack()

    def __enter__(self) -> list[Row]:
        with ExitStack() as block:
            block.enter_context(transaction_block(self._queryset.db))
            rows = list(self)
            self._block = block.pop_all()
        return rows

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)

    def __iter__(self) -> Iterator[Row]:
        # Django refuses FOR UPDATE outside of a transaction. A copy has no rows yet: those of an earlier block are no
        # longer locked.
        return iter(self._queryset.all())


class LockingQuerySet(models.QuerySet[Row]):
    """A queryset whose rows a process can lock to the end of a transaction. It changes no row."""

    def claim(self, limit: int) -> ClaimedRows[Row]:
        """Lock up to ``limit`` free rows of this queryset to the end of the transaction, in its order.

        ::

            with Row.objects.filter(processed=False).claim(10) as rows:
                for row in rows:
                    ...

        If the process dies, PostgreSQL rolls back and releases the rows unchanged. Raises Django's
        ``TransactionManagementError`` when the rows are read outside of a transaction.
        """
        return ClaimedRows(self.select_for_update(skip_locked=True, of=("self",))[:limit])


class ClaimQuerySet(LockingQuerySet[Row]):
    """A queryset from which many processes can claim rows at the same time. Each row is claimed by one of them."""

    def claim_each(
        self, limit: int, function: Callable[[Row], object], *, failed: Mapping[str, Any] | None = None
    ) -> int:
        """Call a function for each free row of this queryset. Return for how many rows it was called.

        One call of ``claim_each`` is one pass over ``limit`` rows at most, in the order of the primary key. Each call
        of the function has its own transaction, in which the row is locked; inside of your own ``atomic()``, a
        savepoint. The next search begins behind that row. So rows that are locked, and dead rows that a long
        transaction keeps, are read once in a pass, not at each search. The next pass finds the rows that were locked::

            while Row.objects.filter(status="new").claim_each(100, handle, failed={"status": "failed"}):
                pass

        If the function raises, its changes in the database are rolled back, the row gets the changes ``failed``, the
        exception is logged, and the pass continues. Without ``failed``, and for an ``OperationalError`` or
        ``InterfaceError``, the exception ends the pass and the row is not changed.
        """
        # select_for_update, so that ``rows.db`` is the database to which the router sends writes.
        rows = behind = self.order_by("pk").select_for_update()
        for count in range(limit):
            with behind.claim(1) as claimed:
                if not claimed:
                    return count
                key = claimed[0].pk  # the function may delete the row, which empties its key
                _call(function, claimed[0], key, failed, rows.db)
                behind = rows.filter(pk__gt=key)
        return limit

    def claim_update(self, limit: int | None, **changes: Any) -> list[Row]:
        """Mark up to ``limit`` rows of this queryset (None: all) with ``changes``. Return these rows, in its order.

        This is one statement, and needs no transaction. After the change, a row must no longer match the queryset.
        Otherwise another process could claim it as well::

            Row.objects.filter(status="new").order_by("id").claim_update(10, status="taken")

        Rows that another transaction has locked are skipped. A row that has changed since the statement began is
        compared with the queryset again; at REPEATABLE READ and above it is a serialization failure, as in any UPDATE.
        Values may be expressions, such as ``F("attempts") + 1``. The model must have all its columns in one table.
        """
        selection = first_free(self, limit)
        # Not self.db: a router may send reads to a replica.
        using, fields = selection.db, self.model._meta.concrete_fields
        marked = mark(selection, changes, *(str(field.column) for field in fields), keep_order=True)
        compiler = selection.query.get_compiler(using)
        converters = compiler.get_converters([field.get_col(self.model._meta.db_table) for field in fields])
        names = [field.attname for field in fields]
        return [self.model.from_db(using, names, row) for row in compiler.apply_converters(marked, converters)]


class ClaimManager(models.Manager.from_queryset(ClaimQuerySet)):  # type: ignore[misc]
    """The manager of a model whose rows are to be claimed: ``objects = ClaimManager()``."""


def _call(function: Callable[[Row], object], row: Row, key: Any, failed: Mapping[str, Any] | None, using: str) -> None:
    try:
        with atomic(using=using, savepoint=failed is not None):
            function(row)
    except (OperationalError, InterfaceError):
        # A deadlock or a lost session. The row is not the cause.
        raise
    except Exception:
        if failed is None:
            raise
        logger.exception("%s %s has failed.", row._meta.label, key)
        row._meta.base_manager.using(using).filter(pk=key).update(**failed)
