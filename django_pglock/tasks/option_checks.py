"""What the options of ``@task`` accept. A check gets the name of the option and the value, and returns what is kept.

All of them raise ``TaskOptionError``, which names the option and the value, and says what to give instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from types import NoneType
from typing import Any, TypeVar

from django_pglock.errors import TaskOptionError
from django_pglock.tasks.compat import TaskResult
from django_pglock.tasks.dates import READABLE, is_readable
from django_pglock.tasks.options import OWN_META, Group, Rate, Unique, check_template, is_whole
from django_pglock.tasks.retry import check_backoff, duration_of

T = TypeVar("T")
Check = Callable[[str, Any], Any]

#: Digits of a bigint, and one more.
MOST_DIGITS = 20


def refuse(option: str, value: object, wanted: str) -> TaskOptionError:
    """Return the error for a value that an option does not accept."""
    return TaskOptionError(f"{option} is {value!r}; give {wanted}.")


def anything(option: str, value: Any) -> Any:
    """Accept each value: it is checked together with other options."""
    return value


def number(least: int, most: int) -> Check:
    """Return the check of a whole number between two bounds."""

    def check(option: str, value: Any) -> Any:
        if not is_whole(value, least, most):
            raise refuse(option, value, f"a number from {least} to {most:,}")
        return value

    return check


def instance(kind: type | tuple[type, ...], wanted: str) -> Check:
    """Return the check of a type."""

    def check(option: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise refuse(option, value, wanted)
        return value

    return check


flag, text = instance(bool, "True or False"), instance(str, "a text")


def priority(option: str, value: Any) -> Any:
    """Accept a number; Django's validation checks its bounds, which fails for other types, and for NaN."""
    # Only NaN differs from itself.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise refuse(option, value, "a whole number from -100 to 100")
    return value


def duration(option: str, value: Any) -> Any:
    """Accept seconds or a timedelta, and return seconds."""
    return duration_of(value, option=option)


def timeout(option: str, value: Any) -> Any:
    """Accept a duration above zero."""
    seconds = duration_of(value, option=option)
    if seconds == 0:
        raise TaskOptionError(f"{option} is 0; give more than 0 seconds, or None for no timeout.")
    return seconds


def backoff(option: str, value: Any) -> Any:
    """Accept seconds, a timedelta, a policy or a function."""
    check_backoff(value)
    return value


def exception_types(option: str, value: Any) -> tuple[type[BaseException], ...]:
    """Accept one exception type or several."""
    types = tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(each, type) and issubclass(each, BaseException) for each in types):
        raise TaskOptionError(f"{option} takes exception types, not {types!r}.")
    return types


def template(option: str, value: Any) -> Any:
    """Accept the template of a key."""
    check_template(value, option=option)
    return value


def unique(option: str, value: Any) -> Unique | None:
    """Accept True, which means the same arguments, a template, or ``Unique``."""
    if value is False:
        return None
    return Unique() if value is True else _made(option, value, Unique, Unique)


def group(option: str, value: Any) -> Group:
    """Accept a template, or ``Group``."""
    return _made(option, value, Group, Group)


def rate(option: str, value: Any) -> Rate:
    """Accept a text such as ``"10/s"``, or ``Rate``."""
    return _made(option, value, Rate, Rate.parse)


def _made(option: str, value: Any, kind: type[T], make: Callable[[str], T]) -> T:
    if isinstance(value, str):
        return make(value)
    if not isinstance(value, kind):
        raise refuse(option, value, f"a template or a {kind.__name__}()")
    return value


def log_level(option: str, value: Any) -> int | None:
    """Accept True, False or a level, and return the least level: 0 for True, None for False."""
    if value is False:
        return None
    level = 0 if value is True else logging.getLevelName(value) if isinstance(value, str) else value
    if not isinstance(level, int) or level < 0:
        raise refuse(option, value, "True, or a level such as 'INFO' or logging.INFO")
    return level


def run_after(option: str, value: Any) -> Any:
    """Accept a date that the tables accept, or a timedelta."""
    if not isinstance(value, (datetime, timedelta, NoneType)):
        raise refuse(option, value, "a datetime or a timedelta")
    if isinstance(value, datetime) and not is_readable(value):
        first, last = (date.date() for date in READABLE)
        raise refuse(option, value, f"a date from {first} to {last}")
    return value


def meta(option: str, value: Any) -> Any:
    """Accept a dict without names that the package itself writes."""
    if not isinstance(value, dict):
        raise refuse(option, value, "a dict")
    if own := sorted(set(OWN_META) & set(value)):
        raise TaskOptionError(f"{option} has {', '.join(own)}, which the package itself writes. Use another name.")
    return value


def task_ids(option: str, value: Any) -> tuple[int, ...]:
    """Accept a result or an id, or several, and return the ids. A text is one id and not a list of characters."""
    is_one = isinstance(value, (str, int)) or hasattr(value, "id")
    try:
        given = (value,) if is_one else tuple(value)
    except TypeError:
        raise TaskOptionError(f"after takes results or their ids, not {value!r}.") from None
    return tuple(map(_task_id, given))


def _task_id(value: Any) -> int:
    given = getattr(value, "id", value)
    if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) < MOST_DIGITS:
        given = int(given)
    if not isinstance(given, int) or isinstance(given, bool):
        if isinstance(value, TaskResult):
            raise TaskOptionError(
                f"after takes results or ids of tasks in PostgreSQL. The result with the id {given!r} is of another "
                "backend of django.tasks."
            )
        raise TaskOptionError(f"after takes results or their ids, not {value!r}.")
    if given < 0:
        raise TaskOptionError("after takes results or their ids, not a negative number.")
    if given >= 2**63:
        raise TaskOptionError("after takes results or their ids, and no task has an id as large as one of these.")
    return given
