"""Makes a queryset into one statement that locks the first free rows and changes them.

Django compiles the queryset, and the result is wrapped into ``WITH … AS MATERIALIZED (SELECT … FOR UPDATE SKIP LOCKED)
UPDATE … RETURNING``. So the rows are defined once, as a queryset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

from django.core.exceptions import EmptyResultSet
from django.db import connections, models
from django.db.models.sql import UpdateQuery

from django_pglock.postgres.connections import transaction_block

Row = TypeVar("Row", bound=models.Model)


def first_free(
    rows: models.QuerySet[Any, Any], limit: int | None = None, *, no_key: bool = False, skip_locked: bool = True
) -> models.QuerySet[Any, Any]:
    """Return a queryset that locks up to ``limit`` rows (None: all) that are not locked, and selects their keys.

    ``no_key``: also rows of which another transaction has locked only the key, as a foreign key does. ``skip_locked``:
    False waits for locked rows.
    """
    # OF: a filter may join other tables. Their rows are not changed, and if one is locked, this must not skip a row of
    # ours. Django writes OF only if the queryset selects instances, so not with values("pk").
    locked = (
        rows.select_for_update(skip_locked=skip_locked, no_key=no_key, of=("self",)).select_related(None).only("pk")
    )
    locked.query.set_annotation_mask(())
    return locked[: _ALL if limit is None else limit]


def mark(selection: models.QuerySet[Any, Any], changes: dict[str, Any], *returning: str) -> list[tuple[Any, ...]]:
    """Change the rows that ``selection`` locks. Return their columns ``returning``, in no particular order."""
    columns = ", ".join(map(connections[selection.db].ops.quote_name, returning))
    try:
        sql, values = marking_sql(selection, changes, columns)
    except EmptyResultSet:
        # Django knows without a query that nothing can match, for example with none() or pk__in=[].
        return []
    with connections[selection.db].cursor() as cursor:
        cursor.execute(sql, values)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows


def mark_rows(rows: models.QuerySet[Row, Row], limit: int | None, changes: dict[str, Any]) -> list[Row]:
    """Change up to ``limit`` of ``rows`` (None: all) that are not locked. Return the changed rows, in order.

    Raises ``ValueError`` for a model whose columns are in several tables.
    """
    _require_one_table(rows.model)
    _require_changes(rows.model, changes)
    selection = first_free(rows, limit)
    # Not rows.db: a router may send reads to a replica.
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


def check_changes(model: type[models.Model], changes: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` for changes that are no dict, ``ValueError`` for an empty one, and Django's error for an
    unknown field.
    """
    if not isinstance(changes, Mapping):
        raise TypeError(f"The changes of a row are {changes!r}; give a dict, such as {{'status': 'failed'}}.")
    _require_changes(model, changes)
    query: Any = model._base_manager.all().query
    query.chain(UpdateQuery).add_update_values(dict(changes))


def _require_changes(model: type[models.Model], changes: Mapping[str, Any]) -> None:
    if not changes:
        raise ValueError(
            f"There is no change for the claimed rows of {model._meta.label}, so they could be claimed again. Give the "
            "new value of at least one field, as in status='taken'."
        )


def checked_limit(limit: int) -> int:
    """Return a limit. Raises ``ValueError`` if it is not a positive number of rows."""
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


#: A limit that no statement reaches.
_ALL = 2**31 - 1
