"""The one settings dict, ``DJANGO_PGLOCK``, as a typed object.

It is read at the moment of use, never at import, and follows ``override_settings``. What can be an argument of a call
or of a command is not a setting.
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
#: Statuses of tasks that are over. (tasks/states.py stands on a higher floor.)
PRUNABLE = ("SUCCESSFUL", "FAILED", "CANCELLED")
#: A hundred years: more than anybody means, and less than the server's calendar holds.
MOST_DAYS = 36_525
#: PostgreSQL's timeouts are ints of milliseconds, and threads cannot wait for ever either: not quite 25 days.
MOST_SECONDS = 2_147_483


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What ``DJANGO_PGLOCK`` may say. Each option carries its sentence in ``metadata["help"]``."""

    USING: str = field(default="default", metadata={"help": "Database alias on which locks are taken."})
    SCOPE: str = field(
        default="auto",
        metadata={
            "help": "Scope of locks that name none: auto, session or transaction. Behind PgBouncer use transaction."
        },
    )
    NAMESPACE: str = field(
        default="",
        metadata={"help": "Prefix of every lock name, where several projects share one database."},
    )
    KEY_FUNCTION: str = field(
        default="django_pglock.keys.sha256_key",
        metadata={"help": "Dotted path of the function that makes the 64-bit key of a name."},
    )
    LOCK_COMMENTS: bool = field(
        default=True,
        metadata={"help": "Write the lock's name as a comment into its statement, so that pg_stat_activity shows it."},
    )
    SLOW_WAIT: float = field(
        default=5.0,
        metadata={"help": "Seconds from which on the log warns that a lock was waited for."},
    )
    SLOW_HOLD: float = field(
        default=60.0,
        metadata={"help": "Seconds from which on the log warns that a lock was held."},
    )
    ASYNC_SESSIONS: int = field(
        default=10,
        metadata={
            "help": "Database sessions that coroutines of one event loop have to themselves for locks. Beyond that, "
            "they share one more."
        },
    )
    MAX_RESPONSE_HOLD: float = field(
        default=3600.0,
        metadata={"help": "Seconds after which the lock of a response that nobody closes is freed in any case."},
    )
    HEARTBEAT_INTERVAL: float = field(
        default=3.0,
        metadata={"help": "Seconds between two signs of life of a worker. Two missing beats raise suspicion."},
    )
    HEARTBEAT_LIMIT: float = field(
        default=30.0,
        metadata={"help": "Seconds without a sign of life within which a worker's tasks run elsewhere in any case."},
    )
    POLL_INTERVAL: float = field(
        default=5.0,
        metadata={"help": "Seconds between two looks for work when no notification comes. The net under LISTEN."},
    )
    ARGUMENTS_LIMIT: int = field(
        default=1024 * 1024,
        metadata={"help": "Most bytes of the positional, and of the keyword arguments of a task, as JSON."},
    )
    MAX_RESCUES: int = field(
        default=3,
        metadata={"help": "How often a task may take its worker down before it ends as FAILED."},
    )
    PRUNE_AFTER: dict[str, float | None] = field(
        default_factory=lambda: {"SUCCESSFUL": 7, "CANCELLED": 30},
        metadata={
            "help": "Days after which finished tasks are deleted, for each status: never where it is None or missing. "
            "A task with keep_result goes when that says."
        },
    )

    REDACT: str | Callable[[str, str, Any], Any] | None = field(
        default=None,
        metadata={
            "help": "A function, or its dotted path, that is called with the path of a task function, the name of an "
            "argument and its value, and returns what the admin and locktasks show for it."
        },
    )

    def __post_init__(self) -> None:
        for name, kind, what in (
            ("USING", str, "a string"),
            ("NAMESPACE", str, "a string"),
            ("KEY_FUNCTION", str, "a dotted path"),
            ("LOCK_COMMENTS", bool, "True or False"),
        ):
            if not isinstance(value := getattr(self, name), kind):
                raise ConfigurationError(f"DJANGO_PGLOCK[{name!r}] is {value!r}; it must be {what}.")
        if self.SCOPE not in SCOPES:
            raise ConfigurationError(
                f"DJANGO_PGLOCK['SCOPE'] is {self.SCOPE!r}; it must be one of {', '.join(SCOPES)}."
            )
        for name in (
            "SLOW_WAIT",
            "SLOW_HOLD",
            "MAX_RESPONSE_HOLD",
            "HEARTBEAT_INTERVAL",
            "HEARTBEAT_LIMIT",
            "POLL_INTERVAL",
        ):
            _require_seconds(name, getattr(self, name))
        if self.HEARTBEAT_LIMIT < 3 * self.HEARTBEAT_INTERVAL:
            raise ConfigurationError(
                "DJANGO_PGLOCK['HEARTBEAT_LIMIT'] must be at least three times HEARTBEAT_INTERVAL, "
                "or living workers would be taken for dead ones."
            )
        if not isinstance(self.ASYNC_SESSIONS, int) or self.ASYNC_SESSIONS < 1:
            raise ConfigurationError(f"DJANGO_PGLOCK['ASYNC_SESSIONS'] is {self.ASYNC_SESSIONS!r}; use 1 or more.")
        if not isinstance(self.ARGUMENTS_LIMIT, int) or not 1 <= self.ARGUMENTS_LIMIT <= 100 * 1024 * 1024:
            raise ConfigurationError(
                f"DJANGO_PGLOCK['ARGUMENTS_LIMIT'] is {self.ARGUMENTS_LIMIT!r}; use bytes, from 1 to 100 MiB."
            )
        if not isinstance(self.MAX_RESCUES, int) or self.MAX_RESCUES < 0:
            raise ConfigurationError(f"DJANGO_PGLOCK['MAX_RESCUES'] is {self.MAX_RESCUES!r}; use 0 or a larger number.")
        _require_days("PRUNE_AFTER", self.PRUNE_AFTER)
        if not (self.REDACT is None or isinstance(self.REDACT, str) or callable(self.REDACT)):
            raise ConfigurationError(f"DJANGO_PGLOCK['REDACT'] is {self.REDACT!r}; use a function or its dotted path.")


def _require_seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MOST_SECONDS:
        raise ConfigurationError(
            f"DJANGO_PGLOCK[{name!r}] is {value!r}; it must be a number of seconds above zero, up to {MOST_SECONDS:,}."
        )


def _require_days(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ConfigurationError(
            f"DJANGO_PGLOCK[{name!r}] is {value!r}; it must be a dict such as {{'SUCCESSFUL': 7}}."
        )
    for status, days in value.items():
        if status not in PRUNABLE:
            raise ConfigurationError(
                f"DJANGO_PGLOCK[{name!r}] names {status!r}; only {', '.join(PRUNABLE)} tasks can be pruned."
            )
        is_number = isinstance(days, (int, float)) and not isinstance(days, bool)
        if days is not None and not (is_number and 0 <= days <= MOST_DAYS):
            raise ConfigurationError(
                f"DJANGO_PGLOCK[{name!r}][{status!r}] is {days!r}; it must be a number of days up to {MOST_DAYS:,}, or "
                "None to keep them for ever."
            )


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """Return the settings in force now.

    Raises ``ConfigurationError`` for a name that does not exist (with the nearest one that does) or a wrong value.
    """
    given = getattr(django_settings, "DJANGO_PGLOCK", {})
    _require_options("DJANGO_PGLOCK", given, [each.name for each in fields(Settings)])
    return Settings(**given)


def task_database(backend: str, options: Any) -> str:
    """Return the database alias that the ``OPTIONS`` of a backend in ``TASKS`` name. Raises ``ConfigurationError``."""
    where = f"TASKS[{backend!r}]['OPTIONS']"
    _require_options(where, options, ["database"])
    alias = options.get("database", DEFAULT_DB_ALIAS)
    if not isinstance(alias, str):
        raise ConfigurationError(f"{where}['database'] is {alias!r}; it must be a string.")
    return alias


def _require_options(where: str, given: Any, known: Sequence[str]) -> None:
    if not isinstance(given, dict):
        raise ConfigurationError(f"{where} must be a dict, not {type(given).__name__}.")
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else f" It knows {', '.join(known)}."
            raise ConfigurationError(f"{where} has no option {name!r}.{hint}")


def key_function() -> Callable[[str], int]:
    """Return the function that ``KEY_FUNCTION`` names. Raises ``ConfigurationError``."""
    return _imported("KEY_FUNCTION", get_settings().KEY_FUNCTION)


def redact_hook() -> Callable[[str, str, Any], Any] | None:
    """Return the function that ``REDACT`` names, if it does. Raises ``ConfigurationError``."""
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


def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting == "DJANGO_PGLOCK":
        get_settings.cache_clear()


setting_changed.connect(_forget, dispatch_uid="django_pglock.conf")
