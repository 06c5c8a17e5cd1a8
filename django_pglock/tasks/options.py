"""What the options of ``@task`` accept, checked when the decorator is applied. Pure.

``unique``, ``group`` and ``rate`` are values, and each has a *key*, given as a template that is filled in with the
arguments of a call, such as ``"order:{order_id}"``. A check gets the name of the option and the value, and returns what
is kept. All of them raise ``TaskOptionError``, which names the option and the value, and says what to give instead.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from types import NoneType
from typing import Any, Literal, TypeVar

from django.utils.dateparse import parse_datetime
from django.utils.timezone import is_aware, make_aware

from django_pglock.errors import TaskOptionError
from django_pglock.tasks.queues import check_text
from django_pglock.tasks.retry import Check, duration, keep
from django_pglock.tasks.states import UniqueScope

#: The largest number of calls that a grouped function can get at once.
MOST_IN_GROUP = 10_000
#: PostgreSQL's smallint.
MOST_CONCURRENT = 32_767
#: The names in a row's ``meta`` that belong to this package. The headers are those of all instruments.
HEADERS = "headers"
OWN_META = ("options", "rate", "after", "after_ended", "on_failure", "redact", "snoozes", HEADERS)
PERIODS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class Unique:
    """No second task of the same function and key while the first one waits or is unfinished, or for a ``period``.

    - ``key``: a template; None (default) means the same arguments.
    - ``while_``: ``"waiting"`` (default): until a worker claims the task, so a call after that makes a second task; or
      ``"unfinished"``: until the task is finished, its retries included.
    - ``period``: seconds or a timedelta, counted from the first enqueue, even if that task has ended since.
    - ``on_conflict``: ``"skip"`` (default) returns the existing task; ``"replace"`` replaces the call of the waiting
      task by the new call, with all its arguments and options; ``"raise"`` raises ``DuplicateTask``.
    """

    key: str | None = None
    while_: Literal["waiting", "unfinished"] = "waiting"
    period: float | timedelta | None = None
    on_conflict: Literal["skip", "replace", "raise"] = "skip"

    def __post_init__(self) -> None:
        keep(self, key=template, period=timeout)
        keep(self, while_=one_of("waiting", "unfinished"), on_conflict=one_of("skip", "replace", "raise"))
        if self.on_conflict == "replace" and self.scope != UniqueScope.WAITING:
            raise TaskOptionError(
                "Unique: on_conflict='replace' needs while_='waiting' and no period, because a running task cannot be "
                "replaced."
            )

    @property
    def scope(self) -> UniqueScope:
        """How long the key is taken."""
        return UniqueScope.PERIOD if self.period is not None else UniqueScope(self.while_.upper())

    @property
    def seconds(self) -> float | None:
        """The period in seconds, if there is one."""
        return None if self.period is None else duration("period", self.period)


@dataclass(frozen=True, slots=True)
class Group:
    """All waiting tasks of one ``key`` run in one call: the function gets the list of their keyword arguments.

    ``limit``: the largest number of calls at once. ``gather``: seconds or a timedelta for which the first call waits
    for others. ``concurrency``: how many runs of one key there may be at the same time, each with other calls.
    """

    key: str
    limit: int = 1000
    gather: float | timedelta = 0
    concurrency: int = 1

    def __post_init__(self) -> None:
        keep(self, key=template, limit=number(1, MOST_IN_GROUP), gather=duration)
        keep(self, concurrency=number(1, MOST_CONCURRENT))

    @property
    def seconds(self) -> float:
        """The time to gather, in seconds."""
        return duration("gather", self.gather)


@dataclass(frozen=True, slots=True)
class Rate:
    """At most ``count`` starts in ``per`` seconds (or a timedelta), by a token bucket in the database.

    ``key`` is a template; None (default) is the function as a whole, or its ``lock`` if it has one. ``burst`` may start
    at once after a pause; with the default of 1, starts are evenly distributed. In any time of the length ``per``, at
    most ``count + burst - 1`` tasks start: ``count`` without a burst. Short: ``rate="10/s"``, ``"100/m"``, ``"1/30s"``.
    """

    count: int
    per: float | timedelta = 1
    key: str | None = None
    burst: int = 1

    def __post_init__(self) -> None:
        keep(self, key=template, count=number(1, 1_000_000), burst=number(1, 1_000_000), per=timeout)

    @property
    def interval(self) -> float:
        """Seconds from one token to the next: longer if more tasks than ``burst`` may be admitted at once."""
        return duration("per", self.per) / (self.count - self.portion + self.burst)

    @property
    def portion(self) -> int:
        """How many tasks may be admitted at once. More than ``burst`` for high rates, so that checks can be rare."""
        # One check every 50 ms is enough. With two, a check that is late for one task does not delay those behind it.
        each = duration("per", self.per) / self.count
        wanted = max(math.ceil(0.05 / each), 2 if each < 0.1 else 1)
        # All tasks of one portion count against ``count``. So for a very short time it must not be most of them.
        return max(self.burst, min(wanted, math.ceil(self.count / 10)))

    @classmethod
    def parse(cls, text: str, option: str = "rate") -> Rate:
        """Return the rate for a text such as ``"10/s"``. Raises ``TaskOptionError``."""
        match = re.fullmatch(r"(\d{1,7})/(\d{0,5})([smhd])", text)
        if not match:
            raise TaskOptionError(
                f"{option} is {text!r}; write it as '10/s', '100/m', '5/h' or '1/30s', or use Rate()."
            )
        return cls(int(match[1]), int(match[2] or 1) * PERIODS[match[3]])


UniqueOption = bool | str | Unique
GroupOption = str | Group
RateOption = str | Rate


T = TypeVar("T")


def refuse(option: str, value: object, wanted: str) -> TaskOptionError:
    """Return the error for a value that an option does not accept."""
    return TaskOptionError(f"{option} is {value!r}; give {wanted}.")


def anything(option: str, value: Any) -> Any:
    """Accept each value: it is checked together with other options."""
    return value


def accepts(is_valid: Callable[[Any], bool], wanted: str) -> Check:
    """Return the check of a value that stays as it is."""

    def check(option: str, value: Any) -> Any:
        if not is_valid(value):
            raise refuse(option, value, wanted)
        return value

    return check


def number(least: int, most: int) -> Check:
    """Return the check of a whole number between two bounds. True and False are none."""
    return accepts(
        lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most,
        f"a number from {least} to {most:,}",
    )


def instance(kind: type | tuple[type, ...], wanted: str) -> Check:
    """Return the check of a type."""
    return accepts(lambda value: isinstance(value, kind), wanted)


def one_of(*values: str) -> Check:
    """Return the check of a text from a list."""
    return accepts(lambda value: value in values, " or ".join(map(repr, values)))


flag, text = instance(bool, "True or False"), instance(str, "a text")
run_after = instance((datetime, timedelta, NoneType), "a datetime or a timedelta")


def timeout(option: str, value: Any) -> Any:
    """Accept a duration above zero."""
    seconds = duration(option, value)
    if seconds == 0:
        raise TaskOptionError(f"{option} is 0; give more than 0 seconds, or None.")
    return seconds


def expiry(option: str, value: Any) -> Any:
    """Accept a duration or a date, and return seconds, or the date as text, which a row can hold."""
    if isinstance(value, datetime):
        return (value if is_aware(value) else make_aware(value)).isoformat()
    # A copy of the task is checked again.
    return value if isinstance(value, str) and parse_datetime(value) else timeout(option, value)


def backoff(option: str, value: Any) -> Any:
    """Accept seconds, a timedelta, a policy or a function."""
    if isinstance(value, type) or not (hasattr(value, "delay") or callable(value)):
        duration(option, value)
    return value


def exception_types(option: str, value: Any) -> tuple[type[BaseException], ...]:
    """Accept one exception type or several."""
    types = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
    if not all(isinstance(each, type) and issubclass(each, BaseException) for each in types):
        raise refuse(option, value, "exception types and not their names, such as OSError or (OSError, KeyError)")
    return types


def template(option: str, value: Any) -> Any:
    """Accept the template of a key, which a row can hold. Its fields are checked with the function."""
    if not isinstance(value, str) or not value:
        raise refuse(option, value, "a template such as 'order:{order_id}'")
    try:
        check_text(value, option)
    except ValueError as error:
        raise TaskOptionError(str(error)) from error
    return value


def unique(option: str, value: Any) -> Unique | None:
    """Accept True, which means the same arguments, a template, or ``Unique``."""
    if value is False:
        return None
    return Unique() if value is True else _made(option, value, Unique, Unique, "True, a template")


def group(option: str, value: Any) -> Group:
    """Accept a template, or ``Group``."""
    return _made(option, value, Group, Group, "a template")


def rate(option: str, value: Any) -> Rate:
    """Accept a text such as ``"10/s"``, or ``Rate``."""
    return _made(option, value, Rate, partial(Rate.parse, option=option), "a text such as '5/s'")


def _made(option: str, value: Any, kind: type[T], make: Callable[[str], T], text: str) -> T:
    if isinstance(value, str):
        return make(value)
    if not isinstance(value, kind):
        raise refuse(option, value, f"{text} or {kind.__name__}(…)")
    return value


def log_level(option: str, value: Any) -> int | None:
    """Accept True, False or a level, and return the least level: 0 for True, None for False."""
    if value is False:
        return None
    level = 0 if value is True else logging.getLevelName(value) if isinstance(value, str) else value
    if not isinstance(level, int) or level < 0:
        raise refuse(option, value, "True, or a level such as 'INFO' or logging.INFO")
    return level


def meta(option: str, value: Any) -> Any:
    """Accept a dict without names that the package itself writes."""
    if not isinstance(value, dict):
        raise refuse(option, value, "a dict")
    if own := sorted(set(OWN_META) & set(value)):
        raise TaskOptionError(f"{option} has {', '.join(own)}, which the package itself writes. Use another name.")
    return value


def task_ids(option: str, value: Any) -> tuple[int, ...]:
    """Accept a result or an id, or several, and return the ids. A text is one id and not a list of characters."""
    is_many = isinstance(value, Iterable) and not isinstance(value, str)
    # The id of a result of another backend of django.tasks is a text of letters and digits.
    ids = [str(getattr(each, "id", each)) for each in (value if is_many else (value,))]
    if not all(map(str.isdecimal, ids)):
        raise refuse(option, ids, "results or ids of tasks in PostgreSQL")
    return tuple(map(int, ids))
