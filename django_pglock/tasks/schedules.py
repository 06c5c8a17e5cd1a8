"""When a function runs by the clock: ``cron`` and ``every``. Pure: no database, and it is told what time it is.

A schedule is told from its row alone, ``expression`` and ``zone``, so that every worker comes to the same ticks, also
while a deploy changes them.

On the days on which clocks change, cron does what Debian's does. A tick at a fixed time that the clocks skip comes
right after the gap; one at a time that comes twice is meant the first time. Where minute or hour begins with a star,
the ticks follow the time that really passes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, NamedTuple
from zoneinfo import ZoneInfo

from django.conf import settings

from django_pglock.errors import LockKeyError, TaskOptionError
from django_pglock.tasks.call_keys import is_grouped, keys_of

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

#: Seconds between two ticks, at least: whoever needs more of them needs no schedule but a loop.
LEAST_EVERY = 0.1
#: Characters that the row has room for.
LONGEST_EXPRESSION = 255
EVERY = "every "
#: From here on the check looks for a first tick; any date would do.
SOME_DAY = datetime(2024, 1, 1, tzinfo=timezone.utc)


class Timing(NamedTuple):
    """When a function runs, as its row says it: ``"every 300 s"``, or a cron expression and the name of its zone."""

    expression: str
    zone: str = ""

    def following(self, tick: datetime, now: datetime) -> datetime:
        """Return the first tick after ``now``. ``every`` counts in whole steps from ``tick``, whatever was missed."""
        if self.expression.startswith(EVERY):
            step = timedelta(seconds=float(self.expression.split()[1]))
            return tick + ((now - tick) // step + 1) * step
        return next(cron_ticks(self.expression, self.zone, now))


def timing_of(task: TaskFields) -> Timing:
    """Return the timing of a scheduled function; without a zone of its own, in ``settings.TIME_ZONE`` as it is now."""
    if task.every is not None:
        return Timing(f"{EVERY}{task.every:.15g} s")
    return Timing(str(task.cron), task.timezone or settings.TIME_ZONE or "UTC")


def cron_ticks(expression: str, zone: str, after: datetime) -> Iterator[datetime]:
    """Yield the ticks of a cron expression after a date, in UTC, each once and in order."""
    from cronsim import CronSim

    for local in CronSim(expression, after.astimezone(ZoneInfo(zone))):
        # In an hour that comes twice it begins with the first one, which may be over.
        tick = local.astimezone(timezone.utc)
        if tick > after:
            yield tick
            after = tick


def is_scheduled(task: TaskFields) -> bool:
    """Say whether the function runs by the clock."""
    return task.cron is not None or task.every is not None


def check_schedule(task: TaskFields, where: str) -> None:
    """Raise ``TaskOptionError`` for a schedule that cannot be kept."""
    if task.timezone is not None and task.cron is None:
        raise TaskOptionError(f"{where}: timezone={task.timezone!r} is for cron; without it there is nothing to place.")
    if not is_scheduled(task):
        return
    if task.cron is not None and task.every is not None:
        raise TaskOptionError(f"{where}: cron and every are two schedules; choose one.")
    if task.cron is not None:
        _check_cron(task.cron, task.timezone, where)
    elif task.every < LEAST_EVERY:  # type: ignore[operator]
        raise TaskOptionError(f"{where}: every is {task.every:g} s; give at least {LEAST_EVERY} seconds.")
    _check_signature(task, where)


def _check_cron(expression: Any, zone: Any, where: str) -> None:
    try:
        from cronsim import CronSimError
    except ImportError as error:
        raise TaskOptionError(f"{where}: cron needs cronsim; pip install django-pglock-tasks[cron]") from error
    _check_zone(zone, where)
    # With a field of seconds, which cronsim knows as well, it would not look after the days on which clocks change.
    if not isinstance(expression, str) or len(expression.split()) != 5 or len(expression) > LONGEST_EXPRESSION:
        raise TaskOptionError(
            f"{where}: cron is {expression!r}; give five fields in at most {LONGEST_EXPRESSION} characters: "
            "minute, hour, day of the month, month, weekday."
        )
    try:
        found = next(cron_ticks(expression, zone or "UTC", SOME_DAY), None)
    except CronSimError as error:
        raise TaskOptionError(f"{where}: cron is {expression!r}, which is no cron expression: {error}.") from error
    if found is None:
        raise TaskOptionError(f"{where}: cron is {expression!r}, which never comes.")


def _check_zone(zone: Any, where: str) -> None:
    if zone is None:
        return
    try:
        ZoneInfo(zone)
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise TaskOptionError(f"{where}: timezone is {zone!r}, which is no zone; write 'Europe/Berlin'.") from error


def _check_signature(task: TaskFields, where: str) -> None:
    given = [None] * (task.takes_context + is_grouped(task))
    try:
        inspect.signature(task.func).bind(*given)
        keys_of(task, (), {})
    except (TypeError, LockKeyError) as error:
        raise TaskOptionError(
            f"{where}: a schedule calls it without arguments; give them defaults: {error}."
        ) from error
