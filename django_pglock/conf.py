"""The one settings dict, ``DJANGO_PGLOCK``, as a typed object.

The settings are read when they are used, never at import, and follow ``override_settings``. An option that can be an
argument of a call or of a command is not a setting.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.db import DEFAULT_DB_ALIAS
from django.utils.module_loading import import_string

from django_pglock.errors import ConfigurationError

SCOPES = ("auto", "session", "transaction")
#: The statuses of finished tasks, a second time: tasks/states.py is on a higher floor.
PRUNABLE = ("SUCCESSFUL", "FAILED", "CANCELLED")
#: A hundred years, which is within the range of PostgreSQL's dates.
MOST_DAYS = 36_525
#: Almost 25 days: PostgreSQL's timeouts are 32-bit numbers of milliseconds, and waits of threads are limited, too.
MOST_SECONDS = 2_147_483
#: A worker is taken for dead after this number of missing heartbeats, whatever its session shows. Ten: a busy moment of
#: a host or of the server condemns no worker, and the tasks of a frozen one wait for half a minute.
BEATS_TO_THE_LIMIT = 10


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _are_ages(value: Any) -> bool:
    return isinstance(value, dict) and all(
        status in PRUNABLE and (days is None or (_is_number(days) and 0 <= days <= MOST_DAYS))
        for status, days in value.items()
    )


#: A check of a value, and the end of the sentence "it must be …".
Rule = tuple[Callable[[Any], bool], str]
TEXT: Rule = (lambda value: isinstance(value, str), "a string")
FUNCTION: Rule = (lambda value: value is None or isinstance(value, str) or callable(value), "a function or its path")
KNOWN_SCOPE: Rule = (lambda value: value in SCOPES, f"one of {', '.join(SCOPES)}")
AGES: Rule = (
    _are_ages,
    f"a dict such as {{'SUCCESSFUL': 7}}, with {', '.join(PRUNABLE)} and numbers of days up to {MOST_DAYS:,} or None",
)


def _seconds(most: int = MOST_SECONDS) -> Rule:
    return (lambda value: _is_number(value) and 0 < value <= most, f"a number of seconds above zero, up to {most:,}")


def _whole(lowest: int, highest: int) -> Rule:
    return (
        lambda value: isinstance(value, int) and lowest <= value <= highest,
        f"a whole number from {lowest:,} to {highest:,}",
    )


def _option(default: Any, rule: Rule, text: str) -> Any:
    # Not default=: a dict cannot be one.
    return field(default_factory=lambda: default, metadata={"rule": rule, "help": text})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of ``DJANGO_PGLOCK`` and their defaults. ``metadata["help"]`` describes each option."""

    USING: str = _option("default", TEXT, "Database alias on which locks are taken.")
    SCOPE: str = _option(
        "auto",
        KNOWN_SCOPE,
        "Default scope of locks: auto, session or transaction. Behind a pooler in transaction mode use transaction.",
    )
    NAMESPACE: str = _option("", TEXT, "Prefix of every lock name, for several projects that share one database.")
    KEY_FUNCTION: str = _option(
        "django_pglock.keys.sha256_key",
        TEXT,
        "Dotted path of the function that computes the signed 64-bit key of a lock name.",
    )
    SLOW_LOCK: float = _option(
        5.0,
        _seconds(),
        "Seconds. A longer wait for a lock is logged as a warning, and so is a lock that was held for ten times as "
        "long.",
    )
    HEARTBEAT_INTERVAL: float = _option(
        3.0,
        _seconds(MOST_SECONDS // BEATS_TO_THE_LIMIT),
        "Seconds between two heartbeats of a worker. A worker that misses two and has no session is dead. After ten "
        "times as long without a heartbeat, other workers run its tasks even if it has a session.",
    )
    POLL_INTERVAL: float = _option(
        5.0, _seconds(), "Seconds between two searches for tasks. They find tasks whose notification was lost."
    )
    ARGUMENTS_LIMIT: int = _option(
        1024 * 1024,
        _whole(1, 100 * 1024 * 1024),
        "Maximum size in bytes of the positional, and of the keyword arguments of a task, as JSON.",
    )
    MAX_RESCUES: int = _option(
        3,
        _whole(0, 32_767),
        "Number of times a task runs again after its worker has died, or its session in the database. After one more "
        "death it is FAILED.",
    )
    PRUNE_AFTER: dict[str, float | None] = _option(  # noqa: RUF009 - it only describes the field
        {"SUCCESSFUL": 7, "CANCELLED": 30},
        AGES,
        "Days after which finished tasks are deleted, by status. None or a missing status: never. A task with "
        "keep_result is deleted after that time instead.",
    )
    KEEP_EVENTS: float = _option(
        30.0, _seconds(MOST_DAYS), "Days for which an event is kept for tasks that begin to wait for it later."
    )
    REDACT: str | Callable[[str, str, Any], Any] | None = _option(  # noqa: RUF009 - it only describes the field
        None,
        FUNCTION,
        "A function, or its dotted path, that is called with the path of a task function, the name of an argument "
        "and its value, and returns what the admin and locktasks show for it.",
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            (is_valid, what), value = each.metadata["rule"], getattr(self, each.name)
            if not is_valid(value):
                raise ConfigurationError(f"DJANGO_PGLOCK[{each.name!r}] is {value!r}; it must be {what}.")

    @property
    def HEARTBEAT_LIMIT(self) -> float:  # noqa: N802 - it is used beside the settings
        """Seconds without a heartbeat after which other workers run a worker's tasks, even if it has a session."""
        return BEATS_TO_THE_LIMIT * self.HEARTBEAT_INTERVAL


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """Return the current settings.

    Raises ``ConfigurationError`` for an unknown option, with the most similar known one, and for a wrong value.
    """
    given = getattr(django_settings, "DJANGO_PGLOCK", {})
    require_options("DJANGO_PGLOCK", given, [each.name for each in fields(Settings)])
    return Settings(**given)


def task_database(backend: str, options: Any) -> str:
    """Return the database alias that the ``OPTIONS`` of a backend in ``TASKS`` name. Raises ``ConfigurationError``."""
    where = f"TASKS[{backend!r}]['OPTIONS']"
    require_options(where, options, ["database", "defaults"])
    alias = options.get("database", DEFAULT_DB_ALIAS)
    if not isinstance(alias, str):
        raise ConfigurationError(f"{where}['database'] is {alias!r}; it must be a string.")
    return alias


def require_options(where: str, given: Any, known: Sequence[str]) -> None:
    """Raise ``ConfigurationError`` unless ``given`` is a dict that has only these keys."""
    if not isinstance(given, dict):
        raise ConfigurationError(f"{where} must be a dict, not {type(given).__name__}.")
    if problems := [unknown_option(where, name, known) for name in given if name not in known]:
        # All at once, so that one start shows all errors.
        raise ConfigurationError(" ".join(problems))


def unknown_option(where: str, name: Any, known: Sequence[str]) -> str:
    """Return the message about an option that does not exist, with the nearest one that does."""
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.7)
    hint = f"Did you mean {nearest[0]!r}?" if nearest else f"Its options are {', '.join(known)}."
    return f"{where} has no option {name!r}. {hint}"


def key_function() -> Callable[[str], int]:
    """Return the function that ``KEY_FUNCTION`` names. Raises ``ConfigurationError`` if it cannot be imported."""
    return _imported("KEY_FUNCTION", get_settings().KEY_FUNCTION)


def redact_hook() -> Callable[[str, str, Any], Any] | None:
    """Return the function of ``REDACT``, or None. Raises ``ConfigurationError`` if it cannot be imported."""
    hook = get_settings().REDACT
    return _imported("REDACT", hook) if isinstance(hook, str) else hook


@lru_cache(maxsize=8)
def _imported(name: str, path: str) -> Callable[..., Any]:
    try:
        function: Any = import_string(path)
    except ImportError as error:
        raise ConfigurationError(f"DJANGO_PGLOCK[{name!r}] is {path!r}, which cannot be imported: {error}.") from error
    if not callable(function):
        raise ConfigurationError(f"DJANGO_PGLOCK[{name!r}] is {path!r}, which is not a function but {function!r}.")
    return function  # type: ignore[no-any-return]


def _clear_cache(*, setting: str, **kwargs: Any) -> None:
    if setting == "DJANGO_PGLOCK":
        get_settings.cache_clear()


setting_changed.connect(_clear_cache, dispatch_uid="django_pglock.conf")
