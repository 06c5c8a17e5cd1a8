"""Makes a queryset into one statement that locks the first free rows and changes them.

Django compiles the queryset, and the result is wrapped into ``WITH … AS MATERIALIZED (SELECT … FOR UPDATE SKIP LOCKED)
UPDATE … RETURNING``. So the rows are defined once, as a queryset.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

from django.core.exceptions import EmptyResultSet
from django.db import connections, models
from django.db.models.sql import UpdateQuery

from django_pglock.postgres.connections import transaction_block

Row = TypeVar("Row", bound=models.Model)


def first_free(
    rows: models.QuerySet[Any, Any], limit: int | None = None, *, no_key: bool = False
) -> models.QuerySet[Any, Any]:
    """Return a queryset that locks up to ``limit`` rows (None: all) that are not locked, and selects their keys.

    ``no_key``: also rows of which another transaction has locked only the key, as a foreign key does.
    """
    # OF: a filter may join other tables. Their rows are not changed, and if one is locked, this must not skip a row of
    # ours. Django writes OF only if the queryset selects instances, so not with values("pk").
    locked = rows.select_for_update(skip_locked=True, no_key=no_key, of=("self",)).select_related(None).only("pk")
    locked.query.set_annotation_mask(())
    return locked[:limit]


def mark(
    selection: models.QuerySet[Any, Any], changes: dict[str, Any], *returning: str, keep_order: bool = False
) -> list[tuple[Any, ...]]:
    """Change the rows that ``selection`` locks. Return the columns ``returning``; in its order with ``keep_order``."""
    columns = ", ".join(map(connections[selection.db].ops.quote_name, returning))
    try:
        sql, values = marking_sql(selection, changes, columns, keep_order=keep_order)
    except EmptyResultSet:
        # Django knows without a query that nothing can match, for example with none() or pk__in=[].
        return []
    with connections[selection.db].cursor() as cursor:
        cursor.execute(sql, values)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


def marking_sql(
    selection: models.QuerySet[Any, Any], changes: dict[str, Any], returning: str, *, keep_order: bool = False
) -> tuple[str, tuple[Any, ...]]:
    """Return the statement that changes the rows of ``selection``, and its values. ``returning`` is SQL.

    ``keep_order``: return the rows in the order of the selection. Raises ``EmptyResultSet`` if nothing can match.
    """
    locking, locked = locking_sql(selection)
    update, updated = _update_of_claimed(selection, changes).get_compiler(selection.db).as_sql()
    # MATERIALIZED: otherwise the planner could execute the selection again for each joined row, and so lock and update
    # more rows than the limit.
    sql = f"WITH claimed (claimed_key) AS MATERIALIZED ({locking})"
    if keep_order:
        keys = _key_columns(selection.model)
        key = ", ".join(connections[selection.db].ops.quote_name(str(field.column)) for field in keys)
        claimed_key = ", ".join(f"claimed_key_{place}" for place in range(len(keys)))
        # RETURNING has no defined order. The row numbers keep the order of the claim.
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
    # Django compiles FOR UPDATE only inside of atomic(). Nothing is sent here, so no transaction begins on the server.
    # An atomic() inside of another one would send a savepoint.
    is_inside = connections[selection.db].in_atomic_block
    with nullcontext() if is_inside else transaction_block(selection.db):
        sql: tuple[str, Sequence[Any]] = selection.query.get_compiler(selection.db).as_sql()
    return sql[0], tuple(sql[1])


def _update_of_claimed(selection: models.QuerySet[Any, Any], changes: dict[str, Any]) -> UpdateQuery:
    is_claimed = _is_claimed(_key_columns(selection.model))
    query: Any = selection.model._base_manager.using(selection.db).filter(is_claimed).query
    update: UpdateQuery = query.chain(UpdateQuery)
    update.add_update_values(changes)
    return update


def _is_claimed(keys: Sequence[models.Field[Any, Any]]) -> models.Q:
    """Return whether a row is one of those claimed."""
    # By an array, because the planner expects one row in a table that was empty at its last VACUUM, and then a join may
    # read the whole table. Only the CTE has a column of this name. With a name that the table has, too, the subquery
    # could refer to the outer table, and then the condition would be true for every row.
    template = "%(expressions)s = ANY (ARRAY(SELECT claimed_key FROM claimed))"
    first = models.Func(models.F(keys[0].name), template=template, output_field=models.BooleanField())
    if len(keys) == 1:
        return models.Q(first)
    # PostgreSQL cannot use an index to compare rows with an array of rows. It finds them by their first column.
    template = "(%(expressions)s) IN (SELECT * FROM claimed)"
    both = models.Func(*(models.F(key.name) for key in keys), template=template, output_field=models.BooleanField())
    return models.Q(first) & models.Q(both)


def _key_columns(model: type[models.Model]) -> list[models.Field[Any, Any]]:
    """Return the fields of the primary key in the order in which a query selects them."""
    return [field for field in model._meta.concrete_fields if field in model._meta.pk_fields]
