"""The top of a task's page: its state in a sentence, the last failure, and the tasks before and after it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from django.db.models import F
from django.db.models.functions import Right
from django.utils import timezone
from django.utils.translation import gettext

from django_pglock.admin.pages import elapsed
from django_pglock.models import Attempt, Task, Waiter
from django_pglock.tasks.states import TaskStatus
from django_pglock.tasks.tracebacks import is_own, message_in

#: Characters of a traceback that are read, from its end.
MOST_READ = 20_000
#: Characters of a traceback, from its end, in which a list looks for the message.
FEW_READ = 2_000
#: Tasks before and after this one that are shown.
FEW = 10
_FRAME = re.compile(r'^ +File "', re.MULTILINE)


@dataclass(frozen=True)
class Frames:
    """Lines of a traceback: frames of the project, or a number of frames of libraries, which are shown folded."""

    text: str
    #: How many frames of libraries these are; 0 for frames of the project.
    folded: int


@dataclass(frozen=True)
class Failure:
    """The last failed or lost attempt."""

    number: int
    exception: str
    message: str
    frames: list[Frames]


def sentence(task: Task) -> str:
    """Return the state of the task in one sentence."""
    now = timezone.now()
    # Not the number of claims: a rescue does not use up an attempt, and a retry by a person begins with the first one.
    is_started = bool(task.attempts_made) and (task.finished_at or task.status == TaskStatus.RUNNING)
    values: dict[str, Any] = {"made": task.retries + bool(is_started), "most": task.max_retries + 1}
    if task.finished_at:
        values["ago"] = elapsed(task.finished_at, now)
        if task.status == TaskStatus.SUCCESSFUL:
            text = gettext("Succeeded %(ago)s ago, at attempt %(made)d of %(most)d.") % values
            ignored = gettext("A cancel was requested, but the function did not stop.")
            return f"{text} {ignored}" if task.cancel_requested_at else text
        if task.status == TaskStatus.FAILED:
            return gettext("Failed %(ago)s ago, at attempt %(made)d of %(most)d.") % values
        return gettext("Was cancelled %(ago)s ago.") % values
    if task.status == TaskStatus.RUNNING:
        values["ago"] = elapsed(task.last_attempted_at or task.enqueued_at, now)
        return gettext("Has been running for %(ago)s: attempt %(made)d of %(most)d.") % values
    if task.status == TaskStatus.SCHEDULED and task.run_after and task.run_after > now:
        values["ago"] = elapsed(now, task.run_after)
        return gettext("Will be ready in %(ago)s. Attempts so far: %(made)d of %(most)d.") % values
    since = max(filter(None, (task.enqueued_at, task.run_after)))
    values["ago"] = elapsed(since, now)
    if task.status == TaskStatus.READY:
        return gettext("Has been ready for %(ago)s. Attempts so far: %(made)d of %(most)d.") % values
    return gettext("Has been waiting for %(ago)s. Attempts so far: %(made)d of %(most)d.") % values


def last_failure(task: Task) -> Failure | None:
    """Return the last failed or lost attempt; None if there is none. One statement, which reads the end of one row."""
    rows = task.failures.order_by("-number").annotate(end=Right("traceback", MOST_READ))
    found = rows.values_list("number", "exception_path", "end").first()
    if found is None:
        return None
    number, path, trace = found
    exception = path.removeprefix("builtins.")
    return Failure(number, exception, message_in(trace, exception), list(_frames_of(trace)))


def last_failures(using: str, tasks: Iterable[Task]) -> dict[int, tuple[str, str]]:
    """Return the exception and the message of the last attempt of those tasks that have failed, by id.

    A task that was cancelled because of a task of its ``after=`` has such a row, too, although it has not begun.

    One statement; none if no task has failed. Tasks that have succeeded or are running are left out.
    """
    without = (TaskStatus.SUCCESSFUL, TaskStatus.RUNNING)
    asked = [each for each in tasks if each.status not in without]
    last = {each.pk: each.attempts_made for each in asked if each.attempts_made or each.status == TaskStatus.CANCELLED}
    if not last:
        return {}
    # Lists instead of pairs, so that PostgreSQL walks the index once; a task has few other attempts of these numbers.
    rows = Attempt.objects.using(using).filter(task__in=last, number__in={*last.values()}).order_by()
    found = rows.values_list("task_id", "number", "exception_path", Right("traceback", FEW_READ))
    return {id_: (path, message_in(end, path)) for id_, number, path, end in found if last[id_] == number}


def before_and_after(task: Task) -> tuple[list[int], list[int]]:
    """Return the ids of tasks that this one was to run after, and of tasks that wait for this one, a few of each."""
    named = task.meta.get("after") if isinstance(task.meta, dict) else None
    before = [int(each) for each in named[:FEW] if str(each).isdigit()] if isinstance(named, list) else []
    if task.finished_at:
        return before, []
    waiting = Waiter.objects.filter(awaited=task.pk, task__isnull=False).order_by("awaited", F("task") + 0)
    return before, [int(each) for each in waiting.values_list("task_id", flat=True)[:FEW]]


def tick_of(task: Task) -> str:
    """Return the tick of the schedule that has enqueued the task; an empty string if something else has."""
    return str(task.meta.get("schedule", "")) if isinstance(task.meta, dict) else ""


def _frames_of(trace: str) -> Iterator[Frames]:
    places = [*(match.start() for match in _FRAME.finditer(trace)), len(trace)]
    frames = [trace[start:end] for start, end in pairwise(places)]
    for is_foreign, group in groupby(frames, key=_is_foreign):
        texts = list(group)
        yield Frames("".join(texts), len(texts) if is_foreign else 0)


def _is_foreign(frame: Any) -> bool:
    return not is_own(frame.partition("\n")[0])
