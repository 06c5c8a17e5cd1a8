"""Values as kombu, Celery's library for messages, writes them: a date is ``{"__type__": "date", "__value__": …}``."""

from __future__ import annotations

import base64
import json
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.utils.functional import Promise

from django_pglock.errors import TaskArgumentsError

#: The types, each with its marker, how it is written, and how it is read. A datetime is a date as well, so it is first.
_TYPES: list[tuple[type, str, Any, Any]] = [
    (datetime, "datetime", datetime.isoformat, datetime.fromisoformat),
    (date, "date", date.isoformat, date.fromisoformat),
    (time, "time", time.isoformat, time.fromisoformat),
    (Decimal, "decimal", str, Decimal),
    (UUID, "uuid", lambda value: {"hex": value.hex}, lambda found: UUID(hex=found["hex"])),
    (bytes, "base64", lambda value: base64.b64encode(value).decode(), base64.b64decode),
]
# kombu writes bytes that are a text as such.
_READERS = {marker: read for _, marker, _, read in _TYPES} | {"bytes": str.encode}


def encode(value: Any, what: str) -> Any:
    """Return a value with only types of JSON in it; ``what`` names it in messages.

    Raises ``TaskArgumentsError`` for a type that kombu does not write either, such as a model or a set.
    """
    try:
        return json.loads(json.dumps(value, default=_written))
    except (TypeError, ValueError, RecursionError) as error:
        text = "Pass the primary key of a model instance, a list for a set, and a text or a dict for any other object."
        raise TaskArgumentsError(f"{what} cannot be written as JSON: {error}. {text}") from error


def decode(value: Any) -> Any:
    """Return a value that ``encode()`` has written, with its dates, decimals and UUIDs."""
    return json.loads(json.dumps(value), object_hook=_read)


def _written(value: Any) -> Any:
    if hasattr(value, "__json__") or isinstance(value, Promise):
        return str(value) if isinstance(value, Promise) else value.__json__()
    for kind, marker, write, _ in _TYPES:
        if isinstance(value, kind):
            return {"__type__": marker, "__value__": write(value)}
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _read(found: dict[str, Any]) -> Any:
    is_marked = found.keys() == {"__type__", "__value__"}
    return _READERS[found["__type__"]](found["__value__"]) if is_marked else found
