"""Claims on any table: take rows that nobody else has, in one statement, and skip those that somebody has.

The claimable set is said once, as a queryset; Django compiles it, and the result is wrapped into a single
``WITH … AS MATERIALIZED (SELECT … FOR UPDATE SKIP LOCKED) UPDATE … RETURNING``. Nothing here knows tasks: mix
``ClaimManager`` into a model of your own and claim its rows the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from django.core.exceptions import EmptyResultSet
from django.db import connections, models, transaction
from django.db.models.sql import UpdateQuery
from psycopg import ClientCursor

from django_pglock.postgres.connections import connection_for
from django_pglock.postgres.message import literals
from django_pglock.store.plans import kept

if TYPE_CHECKING:
    from typing_extensions import Self

Row = TypeVar("Row", bound=models.Model)

#: Stands where the limit goes in a statement that is compiled once and executed with many limits.
_ANY_LIMIT = 918_273_645

#: Whether a row is one of those claimed. By an array: a table that was empty when it was last vacuumed is expected to
#: have one row, and then a join may read all of it. The name belongs to the CTE alone: a column's own name could be
#: taken for the outer table's, and then the condition would be true for every row.
IS_CLAIMED = models.Func(
    models.F("pk"),
    template="%(expressions)s = ANY (ARRAY(SELECT claimed_key FROM claimed))",
    output_field=models.BooleanField(),
)


class ClaimedRows(Sequence[Row]):
    """Rows that are ours until the end of the transaction. Everybody else's claims skip them.

    As a context manager it opens the transaction (or a savepoint in yours): leave the block to commit what you did and
    let the rows go, raise to undo both. Inside your own ``atomic()`` it can also just be iterated. The rows are
    locked when they are first looked at.
    """

    def __init__(self, queryset: models.QuerySet[Row]) -> None:
        self._queryset = queryset
        self._atomic = transaction.atomic(using=queryset.db)

    def __enter__(self) -> Self:
        self._atomic.__enter__()
        try:
            self._rows()
        except BaseException as error:
            self._atomic.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._atomic.__exit__(kind, error, trace)

    def _rows(self) -> list[Row]:
        # Evaluated once and kept by the queryset. Django refuses FOR UPDATE outside a transaction, as it should.
        return list(self._queryset)

    def __len__(self) -> int:
        return len(self._rows())

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows())

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self._rows()[index]


class ClaimQuerySet(models.QuerySet[Row]):
    """A queryset whose rows can be claimed by many processes at once, each row by one of them."""

    def claim(self, limit: int) -> ClaimedRows[Row]:
        """Hold up to ``limit`` rows of this queryset to the end of the transaction, in its order.

        ::

            with Row.objects.filter(processed=False).claim(10) as rows:
                for row in rows:
                    ...

        A process that dies lets its rows go unchanged: PostgreSQL rolls back. Raises ``ValueError`` for a limit below
        one, and Django's ``TransactionManagementError`` when the rows are looked at outside a transaction.
        """
        return ClaimedRows(self.select_for_update(skip_locked=True)[: _checked(limit)])

    def claim_update(self, limit: int, **changes: Any) -> list[Row]:
        """Mark up to ``limit`` rows of this queryset with ``changes`` and return them as they are now, in its order.

        One statement, also outside a transaction: the mark is what keeps others away, so it must take the row out of
        the queryset::

            Row.objects.filter(status="new").order_by("id").claim_update(10, status="taken")

        Values may be expressions, such as ``F("tries") + 1``. Raises ``ValueError`` for a limit below one.
        """
        fields = self.model._meta.concrete_fields
        columns = [str(field.column) for field in fields]
        try:
            sql, params = self._marking_sql(_checked(limit), changes, self._columns(columns), keep_order=True)
        except EmptyResultSet:
            return []
        compiler = self.query.get_compiler(self.db)
        converters = compiler.get_converters([field.get_col(self.model._meta.db_table) for field in fields])
        with connections[self.db].cursor() as cursor:
            cursor.execute(sql, params)
            rows: list[tuple[Any, ...]] = cursor.fetchall()
        names = [field.attname for field in fields]
        return [self.model.from_db(self.db, names, row) for row in compiler.apply_converters(rows, converters)]

    def _mark(self, limit: int, changes: dict[str, Any], *returning: str) -> list[tuple[Any, ...]]:
        """Mark rows as ``claim_update`` does, but return plain tuples of the columns ``returning``, in no order."""
        try:
            sql, params = self._marking_sql(limit, changes, self._columns(returning), keep_order=False)
        except EmptyResultSet:
            # Django knows without asking that nothing can match, as in none() or pk__in=[].
            return []
        with connections[self.db].cursor() as cursor:
            cursor.execute(sql, params)
            rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows

    def _columns(self, names: Sequence[str]) -> str:
        return ", ".join(map(connections[self.db].ops.quote_name, names))

    def _marking_sql(
        self, limit: int, changes: dict[str, Any], returning: str, *, keep_order: bool
    ) -> tuple[str, tuple[Any, ...]]:
        quote = connections[self.db].ops.quote_name
        key = quote(str(self.model._meta.pk.column))
        selection, selected = self._selection_sql(self._selection(limit))
        update, updated = self._update_of_claimed(changes).get_compiler(self.db).as_sql()
        # MATERIALIZED: the planner could otherwise run the selection again for each row it joins, and so lock and
        # update more rows than the limit.
        sql = f"WITH claimed (claimed_key) AS MATERIALIZED ({selection})"
        if keep_order:
            # RETURNING promises no order; the numbers remember the one in which the rows were claimed.
            sql += (
                ", numbered AS (SELECT claimed_key, row_number() OVER () AS claim_order FROM claimed)"
                f", updated AS ({update} RETURNING {returning})"
                f" SELECT updated.* FROM updated JOIN numbered ON claimed_key = {key} ORDER BY claim_order"
            )
        else:
            sql += f" {update} RETURNING {returning}"
        return sql, (*selected, *updated)

    def _selection_sql(self, selection: models.QuerySet[Row, Any]) -> tuple[str, tuple[Any, ...]]:
        """Return the statement that locks the rows of a selection and gives their keys."""
        # Django compiles FOR UPDATE only inside a transaction. Nothing is sent here, so this opens none on the server.
        with transaction.atomic(using=self.db):
            sql: tuple[str, tuple[Any, ...]] = selection.query.get_compiler(self.db).as_sql()
        return sql

    def _selection(self, limit: int) -> models.QuerySet[Row, Any]:
        return self.select_for_update(skip_locked=True).values("pk")[:limit]

    def _update_of_claimed(self, changes: dict[str, Any]) -> UpdateQuery:
        query: Any = self.model._base_manager.using(self.db).filter(IS_CLAIMED).query
        update: UpdateQuery = query.chain(UpdateQuery)
        update.add_update_values(changes)
        return update


class ClaimManager(models.Manager.from_queryset(ClaimQuerySet)):  # type: ignore[misc]
    """The manager to put on a model whose rows are to be claimed: ``objects = ClaimManager()``."""


class ClaimStatement:
    """A marking UPDATE compiled and bound once, executed with many limits.

    Nearly all its values are known when it is made, so psycopg writes them into the text once and the server always
    sees literals: a partial index is used whatever the plan mode, and a claim costs no binding in Python. What is not
    known yet are ``HOLES`` in the queryset, filled in at each execution.
    """

    #: What stands for values that come later: a name, which no name can be, and numbers. The last is the limit's.
    HOLES = ("\0name", 30_313, 918_273_646, _ANY_LIMIT)

    def __init__(self, queryset: ClaimQuerySet[Any], changes: dict[str, Any], returning: str) -> None:
        """Compile it. ``returning`` is SQL."""
        sql, params = queryset._marking_sql(_ANY_LIMIT, changes, returning, keep_order=False)
        self._using = queryset.db
        # Texts, and holes: a value that reads like one of the numbers is a text by then.
        first, *others = sql.split("%s")
        self._pieces: list[str | int] = _cut_limit(first)
        with connections[queryset.db].cursor() as cursor:
            bind = ClientCursor(cursor.connection).mogrify
            for value, text in zip(params, others, strict=True):
                self._pieces.append(value if value in self.HOLES else bind("%s", [value]))
                self._pieces += _cut_limit(text)
        self._holes = [hole for hole in self.HOLES if hole in self._pieces]
        self._to_be_kept = self._filled([f"${place}" for place in range(1, len(self._holes) + 1)])

    def _filled(self, values: Sequence[str]) -> str:
        known: dict[str | int, str] = dict(zip(self._holes, values, strict=True))
        return "".join(known.get(piece, str(piece)) for piece in self._pieces)

    def sql(self, limit: int, *values: str | int) -> str:
        """Return the statement with its holes filled in. The connection has to be open."""
        return self._filled(literals(connection_for(self._using), (*values, limit)))

    def execute(self, limit: int, *values: str | int) -> list[tuple[Any, ...]]:
        """Claim up to ``limit`` rows on this thread's connection; return the columns asked for, in no order."""
        with connections[self._using].cursor() as cursor:
            cursor.execute(kept(cursor, self._to_be_kept, *values, limit) or self.sql(limit, *values))
            rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows


def _cut_limit(sql: str) -> list[str | int]:
    # Django writes the limit into the text.
    before, limit, after = sql.partition(str(_ANY_LIMIT))
    return [before, _ANY_LIMIT, after] if limit else [before]


def _checked(limit: int) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f"A claim takes a number of rows, one or more; {limit!r} was given.")
    return limit
