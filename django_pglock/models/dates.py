"""Dates that other programs may write to a row: PostgreSQL stores dates that Python does not have."""

from __future__ import annotations

from typing import Any

from django.db import models

from django_pglock.tasks.claim import FIRST_DATE, LAST_DATE

#: A date as Python can read it. NULL stays NULL.
_READABLE = f"""CASE WHEN %(sql)s > '{LAST_DATE.isoformat()}' THEN '{LAST_DATE.isoformat()}'::timestamptz
WHEN %(sql)s < '{FIRST_DATE.isoformat()}' THEN '{FIRST_DATE.isoformat()}'::timestamptz ELSE %(sql)s END"""


class ReadableDateTimeField(models.DateTimeField):  # type: ignore[type-arg]
    """A date that is read as the nearest one that Python has in every time zone.

    psycopg raises an error for ``'infinity'``, so one row would break each page that shows it. In ``values()`` the
    column is selected as it is: Django refers to a selected value by its place if the rows are also ordered by it, and
    no index has the order of an expression. For migrations it is Django's field, because the column is the same.
    """

    def deconstruct(self) -> Any:
        """Return what a migration writes: Django's field."""
        name, _path, args, kwargs = super().deconstruct()
        return name, "django.db.models.DateTimeField", args, kwargs

    def select_format(self, compiler: Any, sql: str, params: Any) -> tuple[str, tuple[Any, ...]]:
        """Return the SQL that selects the date."""
        if compiler.query.values_select:
            return sql, params
        return _READABLE % {"sql": sql}, (*params, *params, *params)
