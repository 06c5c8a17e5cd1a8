"""Reads a task for people even if Python refuses a JSON value of its row.

A program that writes tasks with SQL may store an array in thousands of arrays, or a number of more than 4,300 digits.
PostgreSQL accepts both, and json.loads() raises an error. The page of such a task must still show the other values.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from django.db.models import JSONField, TextField
from django.db.models.functions import Cast

from django_pglock.tasks.redaction import NOT_SHOWN

#: The names of the columns as text begin with this.
_TEXT = "json_text_of_"


def first_row(rows: Any) -> Any:
    """Return the first of these tasks, None if there is none. A value that cannot be read is ``NOT_SHOWN``."""
    try:
        return rows.first()
    except (ValueError, RecursionError):
        names = [field.attname for field in rows.model._meta.concrete_fields if isinstance(field, JSONField)]
        row = as_texts(rows, names).first()
        return None if row is None else decoded(row)


def as_texts(rows: Any, names: Iterable[str]) -> Any:
    """Return the tasks with these JSON columns as text. Pass each row to ``decoded``."""
    return rows.defer(*names).annotate(**{f"{_TEXT}{name}": Cast(name, TextField()) for name in names})


def decoded(row: Any) -> Any:
    """Return a row of ``as_texts`` with its values. Those that cannot be read are ``NOT_SHOWN``."""
    for text in [each for each in vars(row) if each.startswith(_TEXT)]:
        setattr(row, text.removeprefix(_TEXT), _decoded(vars(row).pop(text)))
    return row


def _decoded(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return NOT_SHOWN
