"""The ticks of schedules: ``cron`` and ``every``. Pure: no database, and the time is an argument.

The ticks depend only on the row: its ``expression`` and ``zone``. So all workers compute the same ticks, also during a
deployment that changes them.

On the days on which clocks change, cron does the same as Debian's cron. If a tick has a fixed time that the clocks
skip, it is right after the gap. If it has a time that occurs twice, it is only at the first one. If minute or hour
begins with a star, the ticks follow the elapsed time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple
from zoneinfo import ZoneInfo

from django.conf import settings

from django_pglock.errors import LockKeyError, TaskOptionError
from django_pglock.tasks.call_keys import call_signature, keys_of
from django_pglock.tasks.options import PERIODS
from django_pglock.tasks.retry import duration

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

#: The least number of seconds between two ticks. A function that has to run more often needs a loop instead.
LEAST_EVERY = 0.1
#: The width of the column in characters.
LONGEST_EXPRESSION = 255
EVERY = "every "
_INTERVAL = re.compile(rf"{EVERY} *(\d+(?:\.\d+)?) *(s|sec|second|m|min|minute|h|hour|d|day)s?")
#: The check looks for a first tick after this date; any date would do.
SOME_DAY = datetime(2024, 1, 1, tzinfo=timezone.utc)


class Timing(NamedTuple):
    """The times of a schedule, as in its row: ``"every 300 s"``, or a cron expression and the name of its zone.

    People may also write ``"every 5 minutes"``, and leave out the zone: then it is ``settings.TIME_ZONE``.
    """

    expression: str
    zone: str = ""

    @property
    def text(self) -> str:
        """Both in one text."""
        return f"{self.expression} {self.zone}".rstrip()

    @property
    def is_every(self) -> bool:
        """Whether the ticks are an interval apart, and have no date of their own."""
        return self.expression.startswith(EVERY)

    @property
    def step(self) -> timedelta:
        """The time between two ticks of ``every``. Raises ``TaskOptionError`` if it cannot be read."""
        if (match := _INTERVAL.fullmatch(self.expression)) is None:
            raise TaskOptionError(f"{self.expression!r} is not an interval; write it as 'every 5 minutes'.")
        seconds = duration("every", float(match[1]) * PERIODS[match[2][0]])
        if seconds < LEAST_EVERY:
            raise TaskOptionError(f"every is {seconds:g} s; give at least {LEAST_EVERY} seconds.")
        return timedelta(seconds=seconds)

    def following(self, tick: datetime, now: datetime) -> datetime:
        """Return the first tick after ``now``. ``every`` counts whole steps from ``tick`` and skips missed ticks."""
        if self.is_every:
            return tick + ((now - tick) // self.step + 1) * self.step
        return next(cron_ticks(self.expression, self.zone, now))

    @property
    def interval(self) -> float:
        """Seconds between two ticks; of a cron expression, the shortest time between some of its next ticks."""
        return self.step.total_seconds() if self.is_every else _cron_interval(self.expression, self.zone)


@lru_cache(maxsize=1024)
def _cron_interval(expression: str, zone: str) -> float:
    ticks = list(islice(cron_ticks(expression, zone, SOME_DAY), 10))
    return min((later - tick).total_seconds() for tick, later in pairwise(ticks)) if ticks[1:] else math.inf


def timing_of(task: TaskFields) -> Timing:
    """Return the timing of a scheduled function. Without its own zone, it is in the present ``settings.TIME_ZONE``."""
    if task.every is not None:
        return Timing(f"{EVERY}{task.every:.15g} s")
    return Timing(str(task.cron), task.timezone or settings.TIME_ZONE or "UTC")


def cron_ticks(expression: str, zone: str, after: datetime) -> Iterator[datetime]:
    """Yield the ticks of a cron expression after a date, in UTC, each once and in order."""
    from cronsim import CronSim

    for local in CronSim(expression, after.astimezone(ZoneInfo(zone or settings.TIME_ZONE or "UTC"))):
        # If an hour occurs twice, cronsim begins with the first one, which may be over.
        tick = local.astimezone(timezone.utc)
        if tick > after:
            yield tick
            after = tick


def is_scheduled(task: TaskFields) -> bool:
    """Return whether the function has a schedule."""
    return task.cron is not None or task.every is not None


def check_schedule(task: TaskFields, where: str) -> None:
    """Raise ``TaskOptionError`` for an invalid schedule."""
    if task.timezone is not None and task.cron is None:
        raise TaskOptionError(f"{where}: timezone={task.timezone!r} needs cron. Leave it out with every.")
    if not is_scheduled(task):
        return
    if task.cron is not None and task.every is not None:
        raise TaskOptionError(f"{where}: a task has one schedule; give cron or every, not both.")
    if task.cron is not None:
        _check_cron(task.cron, task.timezone, where)
    elif isinstance(task.every, float) and task.every < LEAST_EVERY:
        raise TaskOptionError(f"{where}: every is {task.every:g} s; give at least {LEAST_EVERY} seconds.")
    _check_signature(task, where)


def check_timing(timing: Timing, where: str) -> None:
    """Raise ``TaskOptionError`` for times that people have written, and that no worker could read."""
    expression, zone = timing
    if timing.is_every and zone:
        raise TaskOptionError(f"{where}: an interval has no time zone. Leave {zone!r} out.")
    if timing.is_every:
        _ = timing.step
    elif len(expression.split()) != 5:
        raise TaskOptionError(
            f"{where} is {expression!r}; write an interval, such as 'every 5 minutes', or the five fields of cron, "
            "such as '30 7 * * 1-5'."
        )
    else:
        _check_cron(expression, zone or None, where)


def _check_cron(expression: Any, zone: Any, where: str) -> None:
    try:
        from cronsim import CronSimError
    except ImportError as error:
        raise TaskOptionError(f"{where}: cron needs cronsim; pip install django-pglock-tasks[cron]") from error
    try:
        ZoneInfo("UTC" if zone is None else zone)
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise TaskOptionError(
            f"{where}: timezone is {zone!r}, which is not a time zone; use a name such as 'Europe/Berlin'."
        ) from error
    # cronsim also accepts a field of seconds, but then it does not handle the days on which clocks change.
    if not isinstance(expression, str) or len(expression.split()) != 5 or len(expression) > LONGEST_EXPRESSION:
        raise TaskOptionError(
            f"{where}: cron is {expression!r}; give five fields in at most {LONGEST_EXPRESSION} characters: "
            "minute, hour, day of the month, month, weekday."
        )
    try:
        found = next(cron_ticks(expression, zone or "UTC", SOME_DAY), None)
    except CronSimError as error:
        raise TaskOptionError(f"{where}: cron is {expression!r}, which is not a cron expression: {error}.") from error
    if found is None:
        raise TaskOptionError(f"{where}: cron is {expression!r}, which matches no date.")


def _check_signature(task: TaskFields, where: str) -> None:
    given = [None] * (task.group is not None)
    try:
        call_signature(task.func, task.takes_context).bind(*given)
        keys_of(task, (), {})
    except (TypeError, LockKeyError) as error:
        raise TaskOptionError(
            f"{where}: a schedule calls the function without arguments, so its parameters need defaults: {error}."
        ) from error
