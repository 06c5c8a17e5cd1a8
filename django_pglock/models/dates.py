"""The field of dates that other programs may write."""

from __future__ import annotations

from typing import Any

from django.db import models

from django_pglock.store.statements import readable


class ReadableDateTimeField(models.DateTimeField):  # type: ignore[type-arg]  # takes no arguments when it runs
    """Is read as the nearest date that Python has, so that one row written by hand does not break pages and commands.

    A constraint would cost each statement that changes a task. ``values()`` returns the column itself, because Django
    orders by the place of a selected value, and no index has the order of an expression.
    """

    def select_format(self, compiler: Any, sql: str, params: Any) -> tuple[str, Any]:
        """Return the expression for the list of a SELECT. A subquery returns the column, for the query around it."""
        if compiler.query.subquery or compiler.query.values_select:
            return sql, params
        return readable(sql), (*params, *params, *params)

    def deconstruct(self) -> Any:
        """Return the field for migrations: the column is that of Django's field."""
        name, _path, args, kwargs = super().deconstruct()
        return name, "django.db.models.DateTimeField", args, kwargs
