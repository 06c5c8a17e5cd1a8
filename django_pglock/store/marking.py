"""Makes one statement of a queryset that locks the first free rows and changes them.

Django compiles the queryset, and the result is wrapped into ``WITH … AS MATERIALIZED (SELECT … FOR UPDATE SKIP LOCKED)
UPDATE … RETURNING``. So which rows are meant is said once, as a queryset.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

from django.core.exceptions import EmptyResultSet
from django.db import connections, models, transaction
from django.db.models.sql import UpdateQuery

Row = TypeVar("Row", bound=models.Model)


def first_free(
    rows: models.QuerySet[Any, Any], limit: int | None = None, *, no_key: bool = False
) -> models.QuerySet[Any, Any]:
    """Return a queryset that locks rows which nobody has locked, ``limit`` at most (None: all), and selects their keys.

    ``no_key``: also rows of which another transaction has only the key locked, as a foreign key does.
    """
    # OF: a filter may join other tables, whose rows are neither changed nor a reason to skip one of these. Django
    # writes OF only where it selects instances, so not with values("pk").
    locked = rows.select_for_update(skip_locked=True, no_key=no_key, of=("self",)).select_related(None).only("pk")
    locked.query.set_annotation_mask(())
    return locked[: _ALL if limit is None else limit]


def mark(selection: models.QuerySet[Any, Any], changes: dict[str, Any], *returning: str) -> list[tuple[Any, ...]]:
    """Change the rows that ``selection`` locks; return their columns ``returning``, in no order."""
    columns = ", ".join(map(connections[selection.db].ops.quote_name, returning))
    try:
        sql, values = marking_sql(selection, changes, columns)
    except EmptyResultSet:
        # Django knows without asking that nothing can match, as in none() or pk__in=[].
        return []
    with connections[selection.db].cursor() as cursor:
        cursor.execute(sql, values)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


def mark_rows(rows: models.QuerySet[Row, Row], limit: int | None, changes: dict[str, Any]) -> list[Row]:
    """Change up to ``limit`` of ``rows`` (None: all) that nobody has locked; return them as they are now, in order.

    Raises ``ValueError`` for a model whose rows lie in several tables.
    """
    _require_one_table(rows.model)
    selection = first_free(rows, limit)
    # Not rows.db: a router may send what reads to a replica.
    using = selection.db
    fields = rows.model._meta.concrete_fields
    columns = ", ".join(connections[using].ops.quote_name(str(field.column)) for field in fields)
    try:
        sql, values = marking_sql(selection, changes, columns, keep_order=True)
    except EmptyResultSet:
        return []
    compiler = selection.query.get_compiler(using)
    converters = compiler.get_converters([field.get_col(rows.model._meta.db_table) for field in fields])
    with connections[using].cursor() as cursor:
        cursor.execute(sql, values)
        marked: list[tuple[Any, ...]] = cursor.fetchall()
    names = [field.attname for field in fields]
    return [rows.model.from_db(using, names, row) for row in compiler.apply_converters(marked, converters)]


def _require_one_table(model: type[models.Model]) -> None:
    for field in model._meta.concrete_fields:
        parent: Any = field.model._meta.concrete_model
        if parent is not model._meta.concrete_model:
            raise ValueError(
                f"A row of {model._meta.label} has columns in the table of {parent._meta.label}, too, but one "
                f"statement marks rows of one table. Mark rows of {parent.__name__}.objects, or hold rows by claim() "
                "or claim_each() and save each."
            )


def checked_limit(limit: int) -> int:
    """Return a limit. Raises ``ValueError`` if it is no number of rows."""
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f"The limit of a claim is {limit!r}; give 1 or a larger number.")
    return limit


def marking_sql(
    selection: models.QuerySet[Any, Any], changes: dict[str, Any], returning: str, *, keep_order: bool = False
) -> tuple[str, tuple[Any, ...]]:
    """Return the statement that changes the rows of ``selection``, and its values. ``returning`` is SQL.

    ``keep_order``: return the rows in the order of the selection. Raises ``EmptyResultSet`` if nothing can match.
    """
    locking, locked = locking_sql(selection)
    update, updated = _update_of_claimed(selection, changes).get_compiler(selection.db).as_sql()
    # MATERIALIZED: else the planner could run the selection again for each row that it joins, and so lock and update
    # more rows than the limit.
    sql = f"WITH claimed (claimed_key) AS MATERIALIZED ({locking})"
    if keep_order:
        keys = _key_columns(selection.model)
        key = ", ".join(connections[selection.db].ops.quote_name(str(field.column)) for field in keys)
        claimed_key = ", ".join(f"claimed_key_{place}" for place in range(len(keys)))
        # RETURNING promises no order. The numbers keep the one in which the rows were claimed.
        sql += (
            f", numbered (claim_order, {claimed_key}) AS (SELECT row_number() OVER (), claimed.* FROM claimed)"
            f", updated AS ({update} RETURNING {returning})"
            f" SELECT updated.* FROM updated JOIN numbered ON ({claimed_key}) = ({key}) ORDER BY claim_order"
        )
    else:
        sql += f" {update} RETURNING {returning}"
    return sql, (*locked, *updated)


def locking_sql(selection: models.QuerySet[Any, Any]) -> tuple[str, tuple[Any, ...]]:
    """Return the statement that locks the rows of ``selection`` and returns their keys, and its values."""
    # Django compiles FOR UPDATE only inside of atomic(). Nothing is sent here, so the server sees no transaction. An
    # atomic() inside of another one would send a savepoint.
    is_inside = connections[selection.db].in_atomic_block
    with nullcontext() if is_inside else transaction.atomic(using=selection.db):
        sql: tuple[str, Sequence[Any]] = selection.query.get_compiler(selection.db).as_sql()
    return sql[0], tuple(sql[1])


def _update_of_claimed(selection: models.QuerySet[Any, Any], changes: dict[str, Any]) -> UpdateQuery:
    is_claimed = _is_claimed(_key_columns(selection.model))
    query: Any = selection.model._base_manager.using(selection.db).filter(is_claimed).query
    update: UpdateQuery = query.chain(UpdateQuery)
    update.add_update_values(changes)
    return update


def _is_claimed(keys: Sequence[models.Field[Any, Any]]) -> models.Func:
    """Return whether a row is one of those claimed."""
    # By an array, because the planner expects one row in a table that was empty when it was last vacuumed, and then a
    # join may read the whole table. Only the CTE has a column of this name: the name of a column of the table could be
    # taken for the outer table's, and then the condition would hold for every row.
    template = "%(expressions)s = ANY (ARRAY(SELECT claimed_key FROM claimed))"
    if len(keys) > 1:
        # PostgreSQL uses no index to compare rows with an array of rows.
        template = "(%(expressions)s) IN (SELECT * FROM claimed)"
    return models.Func(*(models.F(key.name) for key in keys), template=template, output_field=models.BooleanField())


def _key_columns(model: type[models.Model]) -> list[models.Field[Any, Any]]:
    """Return the fields of the primary key in the order in which a query selects them."""
    return [field for field in model._meta.concrete_fields if field in model._meta.pk_fields]


#: More rows than one statement ever changes.
_ALL = 2**31 - 1
