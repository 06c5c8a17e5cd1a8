"""Reads a task for people even if Python refuses a JSON value of its row.

A program that writes tasks with SQL may store an array in thousands of arrays, or a number of more than 4,300 digits.
PostgreSQL accepts both, and json.loads() raises an error. The page of such a task must still show the other values.
"""

from __future__ import annotations

import json
from typing import Any

from django.db.models import JSONField, TextField
from django.db.models.functions import Cast

from django_pglock.tasks.redaction import NOT_SHOWN


def first_row(rows: Any) -> Any:
    """Return the first of these tasks, None if there is none. A value that cannot be read is ``NOT_SHOWN``."""
    try:
        return rows.first()
    except (ValueError, RecursionError):
        return _without_unreadable(rows)


def _without_unreadable(rows: Any) -> Any:
    """Read the JSON columns as text, and decode each of them alone."""
    names = [field.attname for field in rows.model._meta.concrete_fields if isinstance(field, JSONField)]
    texts = {f"_{name}_text": Cast(name, TextField()) for name in names}
    row = rows.defer(*names).annotate(**texts).first()
    if row is None:
        return None
    for name in names:
        setattr(row, name, _decoded(row.__dict__.pop(f"_{name}_text")))
    return row


def _decoded(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return NOT_SHOWN
