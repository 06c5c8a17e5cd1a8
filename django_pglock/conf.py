"""The one settings dict, ``DJANGO_PGLOCK``, as a typed object.

The settings are read when they are used, never at import, and follow ``override_settings``. An option that can be an
argument of a call or of a command is not a setting.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Sequence
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


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of ``DJANGO_PGLOCK`` and their defaults. ``metadata["help"]`` describes each option."""

    USING: str = field(default="default", metadata={"help": "Database alias on which locks are taken."})
    SCOPE: str = field(
        default="auto",
        metadata={
            "help": "Default scope of locks: auto, session or transaction. Behind a pooler in transaction mode use "
            "transaction."
        },
    )
    NAMESPACE: str = field(
        default="",
        metadata={"help": "Prefix of every lock name, for several projects that share one database."},
    )
    KEY_FUNCTION: str = field(
        default="django_pglock.keys.sha256_key",
        metadata={"help": "Dotted path of the function that computes the signed 64-bit key of a lock name."},
    )
    SLOW_LOCK: float = field(
        default=5.0,
        metadata={
            "help": "Seconds. A longer wait for a lock is logged as a warning, and so is a lock that was held for ten "
            "times as long."
        },
    )
    HEARTBEAT_INTERVAL: float = field(
        default=3.0,
        metadata={
            "help": "Seconds between two heartbeats of a worker. A worker that misses two and has no session is dead. "
            "After ten times as long without a heartbeat, other workers run its tasks even if it has a session."
        },
    )
    POLL_INTERVAL: float = field(
        default=5.0,
        metadata={"help": "Seconds between two searches for tasks. They find tasks whose notification was lost."},
    )
    ARGUMENTS_LIMIT: int = field(
        default=1024 * 1024,
        metadata={"help": "Maximum size in bytes of the positional, and of the keyword arguments of a task, as JSON."},
    )
    MAX_RESCUES: int = field(
        default=3,
        metadata={
            "help": "Number of times a task runs again after its worker has died, or its session in the database. "
            "After one more death it is FAILED."
        },
    )
    PRUNE_AFTER: dict[str, float | None] = field(
        default_factory=lambda: {"SUCCESSFUL": 7, "CANCELLED": 30},
        metadata={
            "help": "Days after which finished tasks are deleted, by status. None or a missing status: never. A task "
            "with keep_result is deleted after that time instead."
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
        ):
            if not isinstance(value := getattr(self, name), kind):
                raise ConfigurationError(f"DJANGO_PGLOCK[{name!r}] is {value!r}; it must be {what}.")
        if self.SCOPE not in SCOPES:
            raise ConfigurationError(
                f"DJANGO_PGLOCK['SCOPE'] is {self.SCOPE!r}; it must be one of {', '.join(SCOPES)}."
            )
        for name, most in (
            ("SLOW_LOCK", MOST_SECONDS),
            ("HEARTBEAT_INTERVAL", MOST_SECONDS // BEATS_TO_THE_LIMIT),
            ("POLL_INTERVAL", MOST_SECONDS),
        ):
            _require_seconds(name, getattr(self, name), most)
        if not isinstance(self.ARGUMENTS_LIMIT, int) or not 1 <= self.ARGUMENTS_LIMIT <= 100 * 1024 * 1024:
            raise ConfigurationError(
                f"DJANGO_PGLOCK['ARGUMENTS_LIMIT'] is {self.ARGUMENTS_LIMIT!r}; use bytes, from 1 to 100 MiB."
            )
        if not isinstance(self.MAX_RESCUES, int) or self.MAX_RESCUES < 0:
            raise ConfigurationError(f"DJANGO_PGLOCK['MAX_RESCUES'] is {self.MAX_RESCUES!r}; use 0 or a larger number.")
        _require_days("PRUNE_AFTER", self.PRUNE_AFTER)
        if not (self.REDACT is None or isinstance(self.REDACT, str) or callable(self.REDACT)):
            raise ConfigurationError(f"DJANGO_PGLOCK['REDACT'] is {self.REDACT!r}; use a function or its dotted path.")

    @property
    def HEARTBEAT_LIMIT(self) -> float:  # noqa: N802 - it is used beside the settings
        """Seconds without a heartbeat after which other workers run a worker's tasks, even if it has a session."""
        return BEATS_TO_THE_LIMIT * self.HEARTBEAT_INTERVAL


def _require_seconds(name: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
        raise ConfigurationError(
            f"DJANGO_PGLOCK[{name!r}] is {value!r}; it must be a number of seconds above zero, up to {most:,}."
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
                "None to keep them forever."
            )


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """Return the current settings.

    Raises ``ConfigurationError`` for an unknown option, with the most similar known one, and for a wrong value.
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


def require_keys(backend: str, params: Any) -> None:
    """Raise ``ConfigurationError`` for a key of a backend in ``TASKS`` that is a typing error, such as ``QUEUE``."""
    known = ("BACKEND", "OPTIONS", "QUEUES")
    for name in params:
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.7)
        if name not in known and near:
            raise ConfigurationError(f"TASKS[{backend!r}] has {name!r}, which nothing reads. Did you mean {near[0]!r}?")


def require_queues(backend: str, queues: Any) -> None:
    """Raise ``ConfigurationError`` unless ``QUEUES`` of a backend in ``TASKS`` are names of queues.

    Django makes a set of them, so a text would become the names of its letters.
    """
    is_list = isinstance(queues, Collection) and not isinstance(queues, (str, bytes))
    if not is_list or not all(isinstance(name, str) for name in queues):
        raise ConfigurationError(
            f"TASKS[{backend!r}]['QUEUES'] is {queues!r}; give a list of names, such as ['default', 'mail']."
        )


def _require_options(where: str, given: Any, known: Sequence[str]) -> None:
    if not isinstance(given, dict):
        raise ConfigurationError(f"{where} must be a dict, not {type(given).__name__}.")
    if problems := [_unknown_option(where, name, known) for name in given if name not in known]:
        # All at once, so that one start shows all errors.
        raise ConfigurationError(" ".join(problems))


def _unknown_option(where: str, name: Any, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"Did you mean {nearest[0]!r}?" if nearest else f"Its options are {', '.join(known)}."
    return f"{where} has no option {name!r}. {hint}"


def misspelt_names() -> list[str]:
    """Return the names of dicts in the settings that were probably meant to be ``DJANGO_PGLOCK``, which is not set."""
    if hasattr(django_settings, "DJANGO_PGLOCK"):
        return []
    near = [name for name in dir(django_settings) if name.isupper() and _is_near(name)]
    return [name for name in near if isinstance(getattr(django_settings, name), dict)]


def _is_near(name: str) -> bool:
    is_short = name.replace("_", "") in ("PGLOCK", "PGLOCKS")
    return is_short or difflib.SequenceMatcher(None, name, "DJANGO_PGLOCK").ratio() > 0.8


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
