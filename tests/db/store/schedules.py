"""Schedules of the sample functions, for the tests of the verbs of schedules."""

from __future__ import annotations

from datetime import timedelta

from django.db.models.functions import Now

from django_pglock import task
from django_pglock.models import Schedule, Task
from django_pglock.store import schedules
from django_pglock.store.schedules import ScheduleKeeper, known
from django_pglock.tasks import registry
from tests.sample import scheduled

NIGHTLY, HOURLY = "tests.sample.scheduled.nightly", "tests.sample.scheduled.hourly"
HOUR = timedelta(hours=1)


def decorate(function, **options):
    """Decorate the function again, as at a reload of its module; the first definition stays registered."""
    registry._definitions.pop(f"{function.__module__}.{function.__name__}", None)
    return task(**options)(function)


def of_code(path, expression="every 5 s", **fields):
    """Write the row of a schedule of code that no process here has. Returns it."""
    [row] = Schedule.objects.bulk_create([Schedule(name=path, task_path=path, expression=expression, **fields)])
    return row


def register():
    tasks = known("default")
    return ScheduleKeeper("default").register(tasks, schedules._read_rows("default", tasks))


def enqueue_due():
    tasks = known("default")
    return ScheduleKeeper("default").enqueue_due(tasks, schedules._read_rows("default", tasks))


def schedule(function=scheduled.nightly, *, due=None, **options):
    """Decorate and register a function; with ``due``, its tick came so long ago. Returns its row."""
    decorated = decorate(function, **{"every": HOUR, **options})
    register()
    row = Schedule.objects.get(pk=decorated.module_path)
    if due is not None:
        Schedule.objects.filter(pk=row.pk).update(next_at=Now() - due)
        row.refresh_from_db()
    return row


def ticks():
    return list(Task.objects.order_by("id").values_list("task_path", "meta__schedule"))
