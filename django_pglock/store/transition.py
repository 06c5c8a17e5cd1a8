"""Transitions on any table: each row moves from one of some statuses to another status, by one caller only.

An invalid status is refused, because it would silently move nothing. So is a new status that is also one of the old
ones, because such a row could be taken again at once.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from django.db import models

from django_pglock.store.marking import checked_limit, mark_rows

Row = TypeVar("Row", bound=models.Model)


def transition(
    rows: models.QuerySet[Row, Row],
    *,
    from_: Collection[Any] | Any,
    to: Any,
    limit: int | None,
    field: str,
    changes: dict[str, Any],
) -> list[Row]:
    """Move up to ``limit`` of ``rows`` (None: all) from one of the statuses ``from_``. Return the changed rows.

    Raises ``ValueError`` for an invalid transition.
    """
    sources = list(from_) if isinstance(from_, Collection) and not isinstance(from_, str) else [from_]
    if not sources:
        raise ValueError("from_ is empty; give one or more statuses.")
    for status in (*sources, to):
        _require_status(rows.model, field, status)
    if to in sources:
        raise ValueError(f"{_shown(to)} is both in from_ and the value of to.")
    if field in changes:
        raise ValueError(
            f"{field} is set to {_shown(to)} by to, and to {_shown(changes[field])} by a keyword argument."
        )
    if limit is not None:
        checked_limit(limit)
    return mark_rows(rows.filter(**{f"{field}__in": sources}), limit, {field: to, **changes})


def _require_status(model: type[models.Model], field: str, status: Any) -> None:
    name = f"{model.__name__}.{field}"
    choices = [value for value, _ in getattr(model._meta.get_field(field), "flatchoices", ())]
    if status is None or hasattr(status, "resolve_expression"):
        raise ValueError(f"{_shown(status)} is not a value of {name}: a status cannot be None or an expression.")
    if choices and status not in choices:
        values = ", ".join(map(_shown, choices))
        raise ValueError(f"{_shown(status)} is not a value of {name}; its values are {values}.")


def _shown(status: Any) -> str:
    """Return a status for a message; for a member of an enumeration, its value."""
    return repr(getattr(status, "value", status))
