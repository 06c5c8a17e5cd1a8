"""Makes one statement of a queryset that locks the first free rows and changes them.

Django compiles the queryset, and the result is wrapped into ``WITH … AS MATERIALIZED (SELECT … FOR UPDATE SKIP LOCKED)
UPDATE … RETURNING``. So which rows are meant is said once, as a queryset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.core.exceptions import EmptyResultSet
from django.db import connections, models, transaction
from django.db.models.sql import UpdateQuery

#: Whether a row is one of those claimed. By an array, because the planner expects one row in a table that was empty
#: when it was last vacuumed, and then a join may read the whole table. Only the CTE has a column of this name: the
#: name of a column of the table could be taken for the outer table's, and then the condition would hold for every row.
IS_CLAIMED = models.Func(
    models.F("pk"),
    template="%(expressions)s = ANY (ARRAY(SELECT claimed_key FROM claimed))",
    output_field=models.BooleanField(),
)


def first_free(
    rows: models.QuerySet[Any, Any], limit: int | None = None, *, no_key: bool = False
) -> models.QuerySet[Any, Any]:
    """Return a queryset that locks rows which nobody has locked, ``limit`` at most (None: all), and yields their keys.

    ``no_key``: also rows of which another transaction has only the key locked, as a foreign key does.
    """
    return rows.select_for_update(skip_locked=True, no_key=no_key).values("pk")[: _ALL if limit is None else limit]


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
        key = connections[selection.db].ops.quote_name(str(selection.model._meta.pk.column))
        # RETURNING promises no order. The numbers keep the one in which the rows were claimed.
        sql += (
            ", numbered AS (SELECT claimed_key, row_number() OVER () AS claim_order FROM claimed)"
            f", updated AS ({update} RETURNING {returning})"
            f" SELECT updated.* FROM updated JOIN numbered ON claimed_key = {key} ORDER BY claim_order"
        )
    else:
        sql += f" {update} RETURNING {returning}"
    return sql, (*locked, *updated)


def locking_sql(selection: models.QuerySet[Any, Any]) -> tuple[str, tuple[Any, ...]]:
    """Return the statement that locks the rows of ``selection`` and returns their keys, and its values."""
    # Django compiles FOR UPDATE only inside of atomic(). Nothing is sent here, so the server sees no transaction.
    with transaction.atomic(using=selection.db):
        sql: tuple[str, Sequence[Any]] = selection.query.get_compiler(selection.db).as_sql()
    return sql[0], tuple(sql[1])


def _update_of_claimed(selection: models.QuerySet[Any, Any], changes: dict[str, Any]) -> UpdateQuery:
    query: Any = selection.model._base_manager.using(selection.db).filter(IS_CLAIMED).query
    update: UpdateQuery = query.chain(UpdateQuery)
    update.add_update_values(changes)
    return update


#: More rows than one statement ever changes.
_ALL = 2**31 - 1
