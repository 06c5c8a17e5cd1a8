"""``crontab`` of Celery as data, and the move of django-celery-beat's rows to rows of ``Schedule``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

from django.apps import apps
from django.core.exceptions import ValidationError
from django.db import transaction

from django_pglock.contrib.celery import canvas
from django_pglock.contrib.celery.result import rows
from django_pglock.contrib.celery.values import encode
from django_pglock.errors import model_of
from django_pglock.tasks import registry
from django_pglock.tasks.schedules import EVERY, Timing

#: What a row of beat may have, and a schedule has not.
_OF_CALL = ("queue", "exchange", "routing_key", "priority", "expires", "expire_seconds", "start_time")


class crontab:  # noqa: N801 - Celery's name
    """The fields of cron, as ``crontab(minute=0, hour="*/3")``; ``expression`` is ``"0 */3 * * *"``."""

    def __init__(self, minute: Any = "*", hour: Any = "*", day_of_week: Any = "*", **others: Any) -> None:
        day, month = (others.get(name, "*") for name in ("day_of_month", "month_of_year"))
        self.expression = " ".join(map(_field, (minute, hour, day, month, day_of_week)))


def _field(value: Any) -> str:
    is_several = isinstance(value, Iterable) and not isinstance(value, str)
    return ",".join(map(str, sorted(value))) if is_several else str(value).replace(" ", "")


def move() -> Iterator[str]:
    """Make rows of ``Schedule`` of beat's rows, which are disabled from then on. Yield a line for each."""
    beat: Any = apps.get_registered_model("django_celery_beat", "PeriodicTask")
    for row in beat.objects.exclude(task="celery.backend_cleanup").order_by("name"):
        yield f"{row.name}: {_moved(row)}"


def _moved(row: Any) -> str:
    try:
        with transaction.atomic(using=rows().db), transaction.atomic(using=type(row).objects.db):
            return _move(row)
    except (LookupError, ValueError, ValidationError) as error:
        text = " ".join(error.messages) if isinstance(error, ValidationError) else str(error.args[0])
        return f"NOT MOVED. {text}"


def _move(row: Any) -> str:
    if model_of("Schedule").objects.using(rows().db).filter(pk=row.name).exists():
        return "it was moved before."
    what = f"The arguments of {row.name}"
    args, kwargs = encode([json.loads(row.args or "[]"), json.loads(row.kwargs or "{}")], what)
    timing, is_enabled = _timing(row), row.enabled
    # From now on, beat does not run it.
    row.enabled = False
    row.save()
    if row.one_off or row.clocked:
        if not is_enabled or row.total_run_count:
            return "it runs only once, and has run or is disabled."
        now = datetime.now(timezone.utc)
        at = row.clocked.clocked_time if row.clocked else timing.following(now, now)
        canvas.signature(row.task).type.apply_async(args, kwargs, eta=at)
        return f"once, at {at}."
    path = row.task if registry.find(row.task) else canvas.signature(row.task).type.definition.module_path
    columns = {"expression": timing.expression, "timezone": timing.zone, "note": row.description}
    made = model_of("Schedule")(
        name=row.name, task_path=path, args=args, kwargs=kwargs, is_enabled=is_enabled, **columns
    )
    made.save(using=rows().db)
    left = [name for name in _OF_CALL if getattr(row, name, None) is not None]
    without = f" Without {', '.join(left)}: give it at the decorator." if left else ""
    return f"{timing.text}{'' if is_enabled else ', disabled'}.{without}"


def _timing(row: Any) -> Timing:
    cron = row.crontab
    if row.solar:
        raise ValueError("There are no solar schedules here. Write a task that finds the date, and gives it as eta.")
    if row.interval:
        return Timing(f"{EVERY}{timedelta(**{row.interval.period: row.interval.every}).total_seconds():.15g} s")
    if cron is None:
        return Timing("")
    fields = (cron.minute, cron.hour, cron.day_of_month, cron.month_of_year, cron.day_of_week)
    return Timing(" ".join(map(_field, fields)), str(cron.timezone))
