"""What people are shown of a task: its arguments and its result, without what nobody is to read.

The row keeps what the function needs. Everything that shows a row, the admin and ``locktasks``, asks here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from django_pglock.conf import redact_hook
from django_pglock.errors import TaskOptionError
from django_pglock.tasks import registry
from django_pglock.tasks.call_keys import has_digest, names_in_keys, positional_names
from django_pglock.tasks.context import OWN_META

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

logger = logging.getLogger("django_pglock.tasks")

REDACTED = "[redacted]"
#: The name of what a function returns: a word that no parameter can have.
RESULT = "return"
#: Fields of a row that are made of its arguments.
KEYS = ("lock_key", "group_key", "fair_key", "unique_key")

RedactOption = bool | Iterable[str]
Show = Callable[[str, Any], Any]
#: The setting ``REDACT``.
Hook = Callable[[str, str, Any], Any]


def shown(row: Any, field: str) -> Any:
    """Return a field of a task's row as people may see it.

    Hidden is what ``redact=`` of its function names, now or when it was enqueued, and what the setting ``REDACT``
    replaces; and the keys that would tell it.
    """
    value = getattr(row, field)
    if value is None or field not in ("args", "kwargs", "result", "meta", *KEYS):
        return value
    if field in KEYS:
        return _shown_key(row, field, value)
    return _shown_value(field, value, row, _shower(row, redact_hook()))


def fields_behind_keys() -> tuple[str, ...]:
    """Return the fields that ``shown`` reads besides ``meta`` to show a key, so that a list may load them at once."""
    return ("args", "kwargs") if redact_hook() is not None else ()


def _shown_value(field: str, value: Any, row: Any, show: Show) -> Any:
    match field, value:
        case "args", list():
            return [show(name, each) for name, each in zip(_names_of(row, len(value)), value, strict=True)]
        case "kwargs", dict():
            return {name: show(name, each) for name, each in value.items()}
        case "meta", dict():
            return {name: each if name in OWN_META else show(name, each) for name, each in value.items()}
    return show(RESULT if field == "result" else field, value)


def _shown_key(row: Any, field: str, key: str) -> Any:
    """Return a key, unless it may tell a hidden argument.

    A digest is hidden instead of being signed: even so a person who guesses an argument could enqueue the guess and
    compare. The stored key stays as it is, so that all processes find the same call.
    """
    hidden = _hidden_of(row)
    # With a name that is hidden only since, the key was made before that name was refused in templates.
    if hidden is None or hidden != _hidden_then(row) or (hidden and has_digest(key)):
        return REDACTED
    hook = redact_hook()
    value = _shower(row, hook)(field, key)
    # The setting knows values and no templates: where it hides an argument, each key may be made of that one. What it
    # says of the key itself is taken as it is.
    is_whole = hook is None or value != key or _arguments(row, hook) == _arguments(row, None)
    return value if is_whole else REDACTED


def _arguments(row: Any, hook: Hook | None) -> list[Any]:
    show = _shower(row, hook)
    return [_shown_value(field, getattr(row, field), row, show) for field in ("args", "kwargs")]


def _shower(row: Any, hook: Hook | None) -> Show:
    """Return what shows a value of this row by its name."""
    hidden = _hidden_of(row)

    def show(name: str, value: Any) -> Any:
        if hidden is None or name in hidden:
            return REDACTED
        if hook is not None:
            try:
                value = hook(row.task_path, name, value)
            except Exception:
                logger.exception("REDACT failed for %r of %r; it is not shown.", name, row.task_path)
                return REDACTED
        return inside(value)

    def inside(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: show(name, each) for name, each in value.items()}
        return [inside(each) for each in value] if isinstance(value, list) else value

    return show


def _hidden_of(row: Any) -> frozenset[str] | None:
    """Return the names that are hidden, or None for all: as the code says, and as it said when it was enqueued."""
    definition = registry.find(row.task_path)
    now: tuple[str, ...] | bool = definition.redact if definition is not None else ()
    then = _hidden_then(row)
    # Which argument is which, only the function says.
    if isinstance(now, bool) or then is None or (then and definition is None):
        return None
    return then.union(now)


def _hidden_then(row: Any) -> frozenset[str] | None:
    """Return the names that were hidden when the task was enqueued, or None for all."""
    then = row.meta.get("redact", ()) if isinstance(row.meta, dict) else ()
    return frozenset(map(str, then)) if isinstance(then, (list, tuple)) else None


def _names_of(row: Any, count: int) -> list[str]:
    """Return the parameters' names for so many positional arguments; for an unknown function their numbers."""
    definition = registry.find(row.task_path)
    return [str(number) for number in range(count)] if definition is None else positional_names(definition, count)


def redact_of(value: RedactOption, task: TaskFields, where: str) -> tuple[str, ...] | bool:
    """Return what ``redact=`` stands for: names, or True for all. Raises ``TaskOptionError``.

    A key is stored, compared and logged as it is, so none may be made of what is hidden.
    """
    if isinstance(value, bool):
        return value or ()
    is_list = isinstance(value, Iterable) and not isinstance(value, str)
    names = tuple(value) if is_list else ()
    if not is_list or not all(isinstance(name, str) for name in names):
        raise TaskOptionError(f"{where}: redact is {value!r}; give True, or names such as ('card', 'password').")
    if names and (shown_in_keys := sorted(names_in_keys(task) & {*names})):
        raise TaskOptionError(
            f"{where}: a key would show {', '.join(shown_in_keys)}, which redact hides; make the key of something else."
        )
    return names
