"""The history on the page of a schedule: its last runs, and how many ticks have enqueued nothing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext

from django_pglock.admin.pages import elapsed
from django_pglock.admin.task_summary import last_failures, tick_of
from django_pglock.models import Schedule, Task
from django_pglock.store.schedule_runs import last_runs
from django_pglock.tasks.schedules import Timing

#: The most ticks without a task that are counted between two runs.
MOST_TICKS = 50


@dataclass(frozen=True)
class Run:
    """One tick and its task. Times are texts."""

    task: Task
    tick: datetime | None
    wait: str
    took: str
    error: str
    #: How many ticks right before this one have enqueued no task, as text; empty for none, or if that is not known.
    skipped: str


def runs_of(schedule: Schedule) -> list[Run]:
    """Return the last runs of a schedule, the newest first. At most three statements."""
    using = Task.objects.db
    tasks = last_runs(using, schedule.task_path, schedule.last_task)
    errors = last_failures(using, tasks)
    ticks = [_tick(task) for task in tasks]
    return [
        Run(
            task,
            tick,
            _wait(task, tick),
            _run_time(task),
            ": ".join(filter(None, errors.get(task.pk, ()))).removeprefix("builtins."),
            skipped_between(schedule, before, tick),
        )
        for task, tick, before in zip(tasks, ticks, [*ticks[1:], None], strict=False)
    ]


def skipped_between(schedule: Schedule, tick: datetime | None, later: datetime | None) -> str:
    """Return how many ticks lie between two ticks of a schedule, as text; empty for none, or if that is not known.

    They are counted by the present expression of the schedule.
    """
    if tick is None or later is None:
        return ""
    try:
        count = Timing(schedule.expression, schedule.timezone).count_between(tick, later, most=MOST_TICKS + 1)
    except Exception:  # noqa: BLE001 - cronsim is missing here, or another version of the code has written the row
        return ""
    return f"{MOST_TICKS}+" if count > MOST_TICKS else str(count or "")


def _tick(task: Task) -> datetime | None:
    try:
        tick = datetime.fromisoformat(tick_of(task))
    except ValueError:
        return None
    return tick if timezone.is_aware(tick) else None


def _wait(task: Task, tick: datetime | None) -> str:
    """Return how long after the tick the task was started first."""
    if task.started_at is None or tick is None:
        return "-"
    return elapsed(tick, _aware(task.started_at))


def _run_time(task: Task) -> str:
    """Return how long the last attempt took, or has taken so far."""
    if task.last_attempted_at is None or (task.finished_at is None and task.status != "RUNNING"):
        return "-"
    if task.finished_at is None:
        return elapsed(task.last_attempted_at)
    took = (task.finished_at - task.last_attempted_at).total_seconds()
    return gettext("%(seconds).3f s") % {"seconds": took}


def _aware(moment: Any) -> Any:
    """Return a date as it is without USE_TZ, too: the ticks in ``meta`` have a zone."""
    return moment if timezone.is_aware(moment) else timezone.make_aware(moment)
