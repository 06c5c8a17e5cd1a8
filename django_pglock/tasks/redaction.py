"""The values of a task that are shown to people: arguments and results without the redacted ones.

The row keeps all values, because the function needs them. The admin and ``locktasks`` show only these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from django_pglock.conf import redact_hook
from django_pglock.errors import TaskOptionError
from django_pglock.loggers import get_logger
from django_pglock.tasks import registry
from django_pglock.tasks.call_keys import has_digest, names_in_keys, positional_names
from django_pglock.tasks.options import HEADERS, OWN_META

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

logger = get_logger("django_pglock.tasks")

REDACTED = "[redacted]"
#: The name of the result: a word that cannot be the name of a parameter.
RESULT = "return"
#: The fields of a row that are computed from its arguments.
KEYS = ("lock_key", "group_key", "fair_key", "unique_key")

RedactOption = bool | Iterable[str]
Show = Callable[[str, Any], Any]
#: The setting ``REDACT``.
Hook = Callable[[str, str, Any], Any]


def shown(row: Any, field: str) -> Any:
    """Return a field of a task's row in the form that may be shown to people.

    Values are hidden if ``redact=`` of the function names them, now or when the task was enqueued, or if the setting
    ``REDACT`` replaces them. Keys from which a hidden value could be read are hidden, too.
    """
    value = getattr(row, field)
    if value is None or field not in ("args", "kwargs", "result", "meta", *KEYS):
        return value
    if field in KEYS:
        return _shown_key(row, field, value)
    return _shown_value(field, value, row, _make_show(row, redact_hook()))


def shown_step(row: Any, step: Any) -> Any:
    """Return the result of a step of a task, or the payload of its event, as ``shown`` does.

    A result is hidden by the name of its step, and a payload also by that of its event.
    """
    hidden = _hidden_of(row)
    if hidden is not None and step.event is not None and _is_event_among(hidden, step.event):
        return REDACTED
    return _make_show(row, redact_hook())(step.name, step.result)


def shown_payload(event: str, payload: Any) -> Any:
    """Return the payload of an event, unless a known function hides it.

    Any function may wait for any event, so a function with steps whose ``redact`` is True hides all payloads.
    """
    for task in registry.definitions():
        hides_all = task.redact is True and task.takes_context
        if hides_all or (isinstance(task.redact, tuple) and _is_event_among(task.redact, event)):
            return REDACTED
    return _make_show(SimpleNamespace(task_path="", meta=None), redact_hook())(event, payload)


def _is_event_among(names: Iterable[str], event: str) -> bool:
    """Return whether one of the names is that of the event, or its part before a colon: "packed" for "packed:7"."""
    return any(event == name or event.startswith(f"{name}:") for name in names)


def is_redacted(row: Any) -> bool:
    """Return whether a value of this row may have to be hidden, by ``redact=`` or by the setting ``REDACT``."""
    return _hidden_of(row) != frozenset() or redact_hook() is not None


def fields_behind_keys() -> tuple[str, ...]:
    """Return the fields that ``shown`` needs in addition to ``meta`` to show a key, so that a list can load them."""
    return ("args", "kwargs") if redact_hook() is not None else ()


def redacting_paths() -> list[str]:
    """Return the known functions that hide a value."""
    return [task.module_path for task in registry.definitions() if task.redact]


def _shown_value(field: str, value: Any, row: Any, show: Show) -> Any:
    match field, value:
        case "args", list():
            return [show(name, each) for name, each in zip(_names_of(row, len(value)), value, strict=True)]
        case "kwargs", dict():
            return {name: show(name, each) for name, each in value.items()}
        case "meta", dict():
            # Headers may have baggage, which the callers have filled.
            own = {*OWN_META} - {HEADERS}
            return {name: each if name in own else show(name, each) for name, each in value.items()}
    return show(RESULT if field == "result" else field, value)


def _shown_key(row: Any, field: str, key: str) -> Any:
    """Return a key, unless a hidden argument could be read from it.

    A digest is hidden although it is keyed with SECRET_KEY: a person could enqueue a guessed argument and compare.
    """
    hidden = _hidden_of(row)
    # If a name was added to ``redact`` after the enqueue, the key may contain the value of this argument.
    if hidden is None or hidden != _hidden_at_enqueue(row) or (hidden and has_digest(key)):
        return REDACTED
    hook = redact_hook()
    value = _make_show(row, hook)(field, key)
    # The setting gets values but no templates. So if it hides an argument, each key may contain this argument. If it
    # returns another value for the key itself, this value is shown.
    is_whole = hook is None or value != key or _arguments(row, hook) == _arguments(row, None)
    return value if is_whole else REDACTED


def _arguments(row: Any, hook: Hook | None) -> list[Any]:
    show = _make_show(row, hook)
    return [_shown_value(field, getattr(row, field), row, show) for field in ("args", "kwargs")]


def _make_show(row: Any, hook: Hook | None) -> Show:
    """Return the function that shows a value of this row by its name."""
    hidden = _hidden_of(row)

    def show(name: str, value: Any) -> Any:
        if hidden is None or name in hidden:
            return REDACTED
        if hook is not None:
            try:
                value = hook(row.task_path, name, value)
            except Exception:
                logger.exception("REDACT failed for argument %r of %r. The value is not shown.", name, row.task_path)
                return REDACTED
        return _shown_inside(value, show)

    return show


def _shown_inside(value: Any, show: Show) -> Any:
    if isinstance(value, dict):
        return {name: show(name, each) for name, each in value.items()}
    return [_shown_inside(each, show) for each in value] if isinstance(value, list) else value


def _hidden_of(row: Any) -> frozenset[str] | None:
    """Return the hidden names, or None for all: those of the present code, and those at the time of the enqueue."""
    definition = registry.find(row.task_path)
    now: tuple[str, ...] | bool = definition.redact if definition is not None else ()
    then = _hidden_at_enqueue(row)
    # Only the function has the names of positional arguments.
    if isinstance(now, bool) or then is None or (then and definition is None):
        return None
    return then.union(now)


def _hidden_at_enqueue(row: Any) -> frozenset[str] | None:
    """Return the names that were hidden when the task was enqueued, or None for all."""
    # Without readable metadata it is unknown which names were hidden.
    then = () if row.meta is None else row.meta.get("redact", ()) if isinstance(row.meta, dict) else None
    return frozenset(map(str, then)) if isinstance(then, (list, tuple)) else None


def _names_of(row: Any, count: int) -> list[str]:
    """Return the parameters' names for ``count`` positional arguments; for an unknown function, their numbers."""
    definition = registry.find(row.task_path)
    return [str(number) for number in range(count)] if definition is None else positional_names(definition, count)


def redact_of(value: RedactOption, task: TaskFields, where: str) -> tuple[str, ...] | bool:
    """Return the names for ``redact=``, or True for all. Raises ``TaskOptionError``.

    Keys are stored, compared and logged unchanged, so a key must not contain a hidden value.
    """
    if isinstance(value, bool):
        return value or ()
    is_list = isinstance(value, Iterable) and not isinstance(value, str)
    names = tuple(value) if is_list else ()
    if not is_list or not all(isinstance(name, str) for name in names):
        raise TaskOptionError(f"{where}: redact is {value!r}; give True, or names such as ('card', 'password').")
    if shown_in_keys := sorted(names_in_keys(task) & {*names}):
        raise TaskOptionError(
            f"{where}: redact hides {', '.join(shown_in_keys)}, but a key shows it. Use other parameters in the key."
        )
    return names
